"""GPTQ checkpoints: 4 and 8 bit codes packed into int32, one scale and zero point per group and output.

A layer [N, K] with G = K / group_size groups and P = 32 / bits codes to a word, the lowest bits first, has:

    qweight  int32 [K / P, N]   codes of P input features of one output in a word
    qzeros   int32 [G, N / P]   zero points of P outputs in a word
    scales   float [G, N]
    g_idx    int32 [K]          the group of each input feature; absent: k // group_size

w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]) with g = g_idx[k].

`checkpoint_format` "gptq" (v1) stores zero - 1, where 0 wraps to the largest code; "gptq_v2" stores zero.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

import torch

from ...kernels.canonical_weights import DenseWeight, GroupedWeight
from ..checkpoint.files.json_fields import JsonFields
from ..checkpoint.reading.weight_loader import WeightLoader, satisfies
from .config_keys import check_config_keys
from .dense import Dense
from .int32_packing import (
    ACTIVATION_KEYS,
    GROUP_SIZES,
    INT_DTYPES,
    check_packed_sizes,
    check_weight_only,
    group_columns,
    scales_problem,
    unpack_codes,
)
from .unquantized_rules import RULE_KEYS, head_is_quantized, layers_left_out
from .weight_format import FLOAT_DTYPES, LinearSpec, TensorSpec, find_unquantized, is_within_modules

_READ = (
    ACTIVATION_KEYS
    | RULE_KEYS
    | {
        *("quant_method", "bits", "group_size", "sym", "desc_act", "lm_head", "checkpoint_format"),
        *("pack_dtype", "is_marlin_format", "format", "method", "modules_in_block_to_quantize"),
    }
)


@dataclass(frozen=True, slots=True)
class GPTQ:
    """GPTQ format with one checkpoint's settings.

    zero_offset   what was subtracted from a zero point before storing: 1 in v1, 0 in v2
    zeros_borrow  whether 1 was subtracted from the packed word with borrowing between its codes, as GPTQModel does in
                  v1
    desc_act      whether g_idx is likely to be out of order; g_idx itself decides
    unconverted   names of layers that are not quantized
    """

    bits: int
    group_size: int
    sym: bool = True
    zero_offset: int = 1
    zeros_borrow: bool = False
    quantizes_head: bool = False
    desc_act: bool = field(default=False, repr=False)
    unconverted: tuple[str, ...] = ()

    @classmethod
    def read(cls, config: JsonFields, names: Collection[str] = ()) -> GPTQ:
        """Return the format from the `quantization_config` of config.json, or from AutoGPTQ's quantize_config.json.

        names  names of the checkpoint's tensors, which show the unquantized layers where the config lists only
               quantized ones

        Raises CheckpointError naming a key that asks for what is not supported or not understood.
        """
        check_config_keys(config, _READ)
        check_weight_only(config)
        bits = config.integer("bits", 1, 64)
        if bits not in (4, 8):
            raise config.error("bits", "4 or 8")
        group_size = config.integer("group_size", -1, 1 << 20)
        if group_size not in GROUP_SIZES:
            raise config.error("group_size", ", ".join(map(str, GROUP_SIZES)))
        if config.boolean("is_marlin_format", False):
            raise config.error("is_marlin_format", "false: only gptq and gptq_v2 layouts are read")
        config.choice("pack_dtype", ("int32",), default="int32")
        config.choice("method", ("gptq",), default="gptq")
        version = _version(config)
        sym = config.boolean("sym", True)
        return cls(
            bits=bits,
            group_size=group_size,
            sym=sym,
            zero_offset=1 if version == "gptq" else 0,
            zeros_borrow=not sym and "gptqmodel" in str(config.raw.get("meta")).lower(),
            desc_act=config.boolean("desc_act", False),
            quantizes_head=head_is_quantized(config, names),
            unconverted=(*_unconverted(config, names), *layers_left_out(config, names)),
        )

    @property
    def name(self) -> str:
        return f"gptq-int{self.bits}" + (f"-g{self.group_size}" if self.group_size > 0 else "")

    @property
    def codes_per_word(self) -> int:
        return 32 // self.bits

    def tensors(self, linear: LinearSpec) -> dict[str, TensorSpec]:
        if is_within_modules(linear.name, self.unconverted):
            return Dense().tensors(linear)
        outputs, inputs, per_word = linear.out_features, linear.in_features, self.codes_per_word
        group = group_columns(linear, self.group_size)
        check_packed_sizes(linear, per_word, outputs, inputs)
        return {
            f"{linear.name}.qweight": TensorSpec((inputs // per_word, outputs), INT_DTYPES),
            f"{linear.name}.qzeros": TensorSpec((inputs // group, outputs // per_word), INT_DTYPES),
            f"{linear.name}.scales": TensorSpec((inputs // group, outputs), FLOAT_DTYPES, problem=scales_problem),
            f"{linear.name}.g_idx": TensorSpec((inputs,), INT_DTYPES, True, partial(_groups_problem, group=group)),
            f"{linear.name}.bias": TensorSpec((outputs,), FLOAT_DTYPES, optional=not linear.bias),
        }

    def linear(self, weights: WeightLoader, linear: LinearSpec, dtype: torch.dtype) -> DenseWeight | GroupedWeight:
        if is_within_modules(linear.name, self.unconverted):
            return Dense().linear(weights, linear, dtype)
        name, group = linear.name, group_columns(linear, self.group_size)
        order = _permutation(weights, linear, likely=self.desc_act)
        of_group = linear.inputs(group)
        codes = self._codes(weights, linear, order)
        zeros = weights.take(f"{name}.qzeros", of_group, linear.outputs(self.codes_per_word))
        return GroupedWeight(
            codes=codes,
            scales=weights.take(f"{name}.scales", of_group, linear.outputs()).clone().t().contiguous(),
            zeros=self._zeros(zeros).t().contiguous(),
            bits=self.bits,
            group_size=min(group, codes.shape[1]),  # less where a rank has part of a layer that is one group
            permutation=None if order is None else order[linear.inputs()],
            bias=_bias(weights, linear, dtype),
        )

    def units(self, linear: LinearSpec) -> tuple[int, int]:
        if is_within_modules(linear.name, self.unconverted):
            return Dense().units(linear)
        return self.codes_per_word, self.codes_per_word if self.group_size == -1 else self.group_size

    def _codes(self, weights: WeightLoader, linear: LinearSpec, order: torch.Tensor | None) -> torch.Tensor:
        """Return codes, uint8 [N, K], with columns in that order. With an order they are scattered in the file, and all
        are read.
        """
        name = f"{linear.name}.qweight"
        if order is None:
            return unpack_codes(weights.take(name, linear.inputs(self.codes_per_word), linear.outputs()).t(), self.bits)
        return unpack_codes(weights.take(name, slice(None), linear.outputs()).t(), self.bits)[:, order[linear.inputs()]]

    def _zeros(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the true zero points, uint8 [G, N], of packed ones, undoing what was subtracted before they were
        stored.
        """
        if packed.is_meta:  # an outline's tensors have shapes only
            return unpack_codes(packed, self.bits)
        if self.zeros_borrow and self.zero_offset:
            ones = sum(1 << shift for shift in range(0, 32, self.bits))
            return unpack_codes((packed.view(torch.int32).long() + ones).to(torch.int32), self.bits)
        stored = unpack_codes(packed, self.bits)
        # Some writers say "gptq" and store symmetric zero points as they are: 8 and not 7 of 4 bits.
        if self.sym and bool((stored == 2 ** (self.bits - 1)).all()):
            return stored
        largest = (1 << self.bits) - 1
        return (stored + self.zero_offset).bitwise_and(largest)


def _unconverted(config: JsonFields, names: Collection[str]) -> tuple[str, ...]:
    """Return the layers that `modules_in_block_to_quantize` leaves out, and that the file holds unquantized.

    The key has names within a block of the model, "mlp.down_proj", in a list or in lists of those quantized together.
    """
    key = "modules_in_block_to_quantize"
    found = config.raw.get(key) or []
    groups = found if isinstance(found, list) else [None]
    listed = [name for group in groups for name in (group if isinstance(group, list) else [group])]
    if not all(isinstance(name, str) for name in listed):
        raise config.error(key, "a list of names of layers, or lists of them")
    if not listed:
        return ()

    def is_listed(name: str) -> bool:
        return any(f".{name}".endswith(f".{each}") for each in listed)

    quantized = (name.removesuffix(".qweight") for name in sorted(names) if name.endswith(".qweight"))
    if surplus := next((name for name in quantized if not is_listed(name) and name != "lm_head"), None):
        raise config.error(key, f"a list with {surplus}, which the file holds quantized")
    return tuple(name for name in find_unquantized(names, ("",), "qweight") if not is_listed(name))


def _version(config: JsonFields) -> str:
    """Return the version of the format. Newer files of GPTQModel call `checkpoint_format` `format`, and some
    have both.
    """
    found = {key: config.choice(key, ("gptq", "gptq_v2")) for key in ("checkpoint_format", "format") if key in config}
    if len({*found.values()}) > 1:
        raise config.error("format", f"the same as checkpoint_format, {found['checkpoint_format']}")
    return next(iter(found.values()), "gptq")


def _permutation(weights: WeightLoader, linear: LinearSpec, *, likely: bool) -> torch.Tensor | None:
    """Return input features in the order of their groups; None where they are in that order already."""
    name = f"{linear.name}.g_idx"
    if name not in weights:
        return None
    groups = weights.take(name).long()
    if satisfies(groups, lambda each: (each[1:] >= each[:-1]).all(), outlined=not likely):
        return None
    return torch.argsort(groups, stable=True)


def _groups_problem(groups: torch.Tensor, group: int) -> str | None:
    groups, count = groups.long(), groups.numel() // group
    if bool((groups < 0).any() | (groups >= count).any()):
        return f"has groups outside 0 to {count - 1}"
    if bool((torch.bincount(groups, minlength=count) != group).any()):
        return f"has groups of other sizes than {group}"
    return None


def _bias(weights: WeightLoader, linear: LinearSpec, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a layer's bias. AutoGPTQ stores a bias of zeros for layers that have none, which is dropped."""
    name = f"{linear.name}.bias"
    if name not in weights:
        return None
    bias = weights.take_finite(name, dtype, linear.outputs())
    if not linear.bias and satisfies(bias, lambda each: (each != 0).any(), outlined=False):
        raise weights.error(name, "is not zero, but config.json says that this layer has no bias")
    return bias if linear.adds_bias else None
