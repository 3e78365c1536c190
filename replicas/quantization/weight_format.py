"""Interface of a checkpoint format: which tensors a linear layer has in it, and how they become a weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ...kernels.canonical_weights import FP8_BLOCK, DenseWeight, Fp8Weight, GroupedWeight, Weight, concat_parts
from ..checkpoint.reading.weight_loader import WeightLoader

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Requirements on a tensor: its shape, and the dtypes that it may have, by safetensors' names.

    optional  whether it may be absent
    problem   returns what is wrong with its values, if anything; None to require that floats are finite
    others    shapes that it may have instead
    """

    shape: tuple[int, ...]
    dtypes: Collection[str]
    optional: bool = False
    problem: Callable[[torch.Tensor], str | None] | None = None
    others: tuple[tuple[int, ...], ...] = ()


Span = tuple[int, int]  # [first, last)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Linear layer [out_features, in_features] by its name in the checkpoint, or a part of it.

    rows     range of its outputs that is wanted; None for all
    columns  range of its inputs that is wanted; None for all
    """

    name: str
    out_features: int
    in_features: int
    bias: bool
    rows: Span | None = None
    columns: Span | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of the wanted outputs and inputs."""
        rows, columns = self.rows or (0, self.out_features), self.columns or (0, self.in_features)
        return rows[1] - rows[0], columns[1] - columns[0]

    def outputs(self, unit: int = 1) -> slice:
        """Return the wanted outputs as a slice in units of so many, which must be whole, as `WeightFormat.units`
        says.
        """
        return _in_units(self.rows, unit)

    def inputs(self, unit: int = 1) -> slice:
        return _in_units(self.columns, unit)

    @property
    def adds_bias(self) -> bool:
        """Whether this part adds the bias: of parts whose outputs are summed only the first does."""
        return self.bias and (self.columns is None or self.columns[0] == 0)


def _in_units(span: Span | None, unit: int) -> slice:
    return slice(None) if span is None else slice(span[0] // unit, -(-span[1] // unit))


def is_within_modules(name: str, modules: Collection[str]) -> bool:
    """Return whether a layer is one of these modules or within one, by whole parts of its name.

    "self_attn", "layers.0.mlp" and "model.layers.0" name several layers, and "mlp.gate" does not name mlp.gate_proj.
    """
    return any(f".{module}." in f".{name}." for module in modules)


def find_unquantized(names: Collection[str], modules: Collection[str], mark: str) -> tuple[str, ...]:
    """Return the layers that a config calls unquantized, by whole parts of their names or by any part of them, and that
    are.

    names    names of the checkpoint's tensors
    modules  as the config has them; some writers read "gate" as any part of a name, others as a whole part
    mark     last part of the name of a tensor that each quantized layer has
    """
    plain = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    plain -= {name.removesuffix(f".{mark}") for name in names if name.endswith(f".{mark}")}
    return tuple(sorted(name for name in plain if any(module in name for module in modules)))


class WeightFormat(Protocol):
    """Protocol of a checkpoint format. A format is one class in one file, and one line in the registry."""

    @property
    def name(self) -> str:
        """Name of the format that users see, as in "gptq-int4-g128"."""
        ...

    @property
    def quantizes_head(self) -> bool:
        """Whether the vocabulary projection is quantized in this format as well."""
        ...

    def tensors(self, linear: LinearSpec) -> dict[str, TensorSpec]:
        """Return the tensors of a layer by full name. Raises CheckpointError if the format cannot hold it."""
        ...

    def linear(self, weights: WeightLoader, linear: LinearSpec, dtype: torch.dtype) -> Weight:
        """Take a layer's tensors, or what its rows and columns need of them, and return its weight.

        dtype  dtype of the activations, to which unquantized tensors are cast

        Columns of a weight with a permutation count in the permuted order, and the permutation names features of the
        whole input. Raises CheckpointError naming file and tensor.
        """
        ...

    def units(self, linear: LinearSpec) -> tuple[int, int]:
        """Return the numbers at multiples of which a layer's outputs and its inputs can be divided."""
        ...


def fuse_layer_weights(weights: Sequence[Weight]) -> list[Weight]:
    """Return one weight of stacked rows where the members allow it, else the members themselves.

    The output of the fused weight is the members' outputs side by side, to the bit, since rows are independent.
    """
    if len(weights) == 1 and not isinstance(weights[0], Fp8Weight):
        return [*weights]  # a single fp8 weight goes on, to have its scales expanded to one for each row
    dense = [weight for weight in weights if isinstance(weight, DenseWeight)]
    if len(dense) == len(weights):
        return [DenseWeight(concat_parts([weight.weight for weight in dense]), _stacked_bias(weights))]
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if len(grouped) == len(weights) and all(_can_fuse(grouped[0], other) for other in grouped):
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
    """Return the scales of stacked weights; None where a block would lie in two members, or only some have blocks."""
    in_blocks = [weight.in_blocks for weight in weights]
    if not any(in_blocks):
        return concat_parts([weight.scales.expand(weight.shape[0], 1) for weight in weights])
    if all(in_blocks) and not any(weight.shape[0] % FP8_BLOCK for weight in weights[:-1]):
        return concat_parts([weight.scales for weight in weights])
    return None


def _can_fuse(one: GroupedWeight, other: GroupedWeight) -> bool:
    if (one.bits, one.group_size) != (other.bits, other.group_size):
        return False
    if one.permutation is None or other.permutation is None:
        return one.permutation is other.permutation
    return one.permutation.is_meta or torch.equal(one.permutation, other.permutation)


def _stacked_bias(weights: Sequence[Weight]) -> torch.Tensor | None:
    """Return the stacked bias, in which members without one count as zero; None if none has one."""
    some = next((weight.bias for weight in weights if weight.bias is not None), None)
    if some is None:
        return None
    return concat_parts([some.new_zeros(w.shape[0]) if w.bias is None else w.bias for w in weights])
