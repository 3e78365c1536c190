"""What a checkpoint format is: which tensors a linear layer has in it, and how they become a weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ...kernels.canonical_weights import FP8_BLOCK, DenseWeight, Fp8Weight, GroupedWeight, Weight, concat_parts
from ..weights import Weights

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor must look like: shape, and the dtypes it may have by safetensors' names.

    problem  what is wrong with its values, if anything; None: floats must be finite
    others   shapes that it may have instead
    """

    shape: tuple[int, ...]
    dtypes: Collection[str]
    optional: bool = False
    problem: Callable[[torch.Tensor], str | None] | None = None
    others: tuple[tuple[int, ...], ...] = ()


Span = tuple[int, int]  # [first, last)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer [out_features, in_features] by its name in the checkpoint.

    rows     which of its outputs are wanted; None: all
    columns  likewise of its inputs
    """

    name: str
    out_features: int
    in_features: int
    bias: bool
    rows: Span | None = None
    columns: Span | None = None

    def outputs(self, unit: int = 1) -> slice:
        """Which are wanted, in units of so many; whole ones, as `Format.units` has it."""
        return _in_units(self.rows, unit)

    def inputs(self, unit: int = 1) -> slice:
        return _in_units(self.columns, unit)

    @property
    def adds_bias(self) -> bool:
        """Of parts whose outputs are summed, one has the bias."""
        return self.bias and (self.columns is None or self.columns[0] == 0)


def _in_units(span: Span | None, unit: int) -> slice:
    return slice(None) if span is None else slice(span[0] // unit, -(-span[1] // unit))


def is_part(name: str, modules: Collection[str]) -> bool:
    """Whether a layer is one of these modules or within one, by whole parts of its name.

    "self_attn", "layers.0.mlp" and "model.layers.0" name several layers, and "mlp.gate" not mlp.gate_proj.
    """
    return any(f".{module}." in f".{name}." for module in modules)


def left_plain(names: Collection[str], modules: Collection[str], mark: str) -> tuple[str, ...]:
    """Layers that a config calls unquantized, by whole parts of their names or by any part of them, and that are.

    names    of the checkpoint's tensors
    modules  as the config has them: its writers read "gate" as one of both
    mark     the last part of the name of a tensor that a quantized layer has
    """
    plain = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    plain -= {name.removesuffix(f".{mark}") for name in names if name.endswith(f".{mark}")}
    return tuple(sorted(name for name in plain if any(module in name for module in modules)))


class Format(Protocol):
    """A format is one class in one file, and one line in registry.py."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    @property
    def quantizes_head(self) -> bool:
        """Whether the vocabulary projection is in this format too."""
        ...

    def tensors(self, linear: LinearSpec) -> dict[str, TensorSpec]:
        """The tensors of a layer by full name. Raises CheckpointError if the format cannot hold it."""
        ...

    def linear(self, weights: Weights, linear: LinearSpec, dtype: torch.dtype) -> Weight:
        """Take a layer's tensors, or what its rows and columns need of them. `dtype`: of the activations; unquantized
        tensors are cast to it.

        Columns of a weight with a permutation are those of that order, and it names features of the whole input.

        Raises CheckpointError naming file and tensor.
        """
        ...

    def units(self, linear: LinearSpec) -> tuple[int, int]:
        """Its outputs can be divided at multiples of the one, its inputs at multiples of the other."""
        ...


def fuse(weights: Sequence[Weight]) -> list[Weight]:
    """One weight of stacked rows where the members allow it, else the members themselves.

    y of the fused one is the members' y side by side, to the bit: rows are independent.
    """
    if len(weights) == 1 and not isinstance(weights[0], Fp8Weight):
        return [*weights]  # of fp8 the scales are brought to one for each row, below
    dense = [weight for weight in weights if isinstance(weight, DenseWeight)]
    if len(dense) == len(weights):
        return [DenseWeight(concat_parts([weight.weight for weight in dense]), _stacked_bias(weights))]
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if len(grouped) == len(weights) and all(_alike(grouped[0], other) for other in grouped):
        return [
            replace(
                grouped[0],
                codes=concat_parts([weight.codes for weight in grouped]),
                scales=concat_parts([weight.scales for weight in grouped]),
                zeros=concat_parts([weight.zeros for weight in grouped]),
                bias=_stacked_bias(weights),
            )
        ]
    fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    if len(fp8) == len(weights) and (scales := _stacked_scales(fp8)) is not None:
        return [Fp8Weight(concat_parts([weight.codes for weight in fp8]), scales, _stacked_bias(weights))]
    return list(weights)


def _stacked_scales(weights: Sequence[Fp8Weight]) -> torch.Tensor | None:
    """None where a block would lie in two members, or only some have blocks."""
    in_blocks = [weight.in_blocks for weight in weights]
    if not any(in_blocks):
        return concat_parts([weight.scales.expand(weight.shape[0], 1) for weight in weights])
    if all(in_blocks) and not any(weight.shape[0] % FP8_BLOCK for weight in weights[:-1]):
        return concat_parts([weight.scales for weight in weights])
    return None


def _alike(one: GroupedWeight, other: GroupedWeight) -> bool:
    if (one.bits, one.group_size) != (other.bits, other.group_size):
        return False
    if one.permutation is None or other.permutation is None:
        return one.permutation is other.permutation
    return one.permutation.is_meta or torch.equal(one.permutation, other.permutation)


def _stacked_bias(weights: Sequence[Weight]) -> torch.Tensor | None:
    """Members without a bias count as zero; None if none has one."""
    some = next((weight.bias for weight in weights if weight.bias is not None), None)
    if some is None:
        return None
    return concat_parts([some.new_zeros(w.shape[0]) if w.bias is None else w.bias for w in weights])
