"""AWQ checkpoints in AutoAWQ's GEMM layout: 4 bit codes, eight to an int32, one scale and zero point per group.

A layer [N, K] with G = K / group_size groups has:

    qweight  int32 [K, N / 8]   codes of eight outputs of one input feature in a word
    qzeros   int32 [G, N / 8]   zero points, eight to a word in the same order
    scales   float [G, N]

Nibble i of a word, the lowest first, is output ORDER[i] of its eight.

w[n, k] = scales[k // group_size, n] * (code[k, n] - zero[k // group_size, n]); zero points are stored as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ...kernels.canonical_weights import DenseWeight, GroupedWeight
from ..checkpoint.files.json_fields import JsonFields
from ..checkpoint.reading.weight_loader import WeightLoader
from .config_keys import check_config_keys
from .dense import Dense, take_bias
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

BITS = 4
PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each nibble, the lowest nibble first

_READ = (
    ACTIVATION_KEYS
    | RULE_KEYS
    | {
        *("quant_method", "method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "sym"),
        *("version", "format", "checkpoint_format", "backend", "modules_to_not_convert", "pack_dtype", "lm_head"),
    }
)
_LAYOUTS = ("gemm", "GEMM")


@dataclass(frozen=True, slots=True)
class AWQ:
    """AWQ format with one checkpoint's settings.

    unconverted  names of modules whose layers are not quantized
    """

    group_size: int
    unconverted: tuple[str, ...] = ()
    bits: int = BITS
    quantizes_head: bool = False

    @classmethod
    def read(cls, config: JsonFields, names: Collection[str] = ()) -> AWQ:
        """Return the format from the `quantization_config` of config.json, or from AutoAWQ's quant_config.json.

        Zero points are read from the file even where `zero_point` is false: then all are the middle code.

        names  names of the checkpoint's tensors, which show which layers `modules_to_not_convert` means

        Raises CheckpointError naming a key that asks for what is not supported or not understood.
        """
        check_config_keys(config, _READ)
        check_weight_only(config)
        if _read_either_key(config, "bits", "w_bit") != BITS:
            raise config.error("bits", "4")
        group_size = _read_either_key(config, "group_size", "q_group_size")
        if group_size not in GROUP_SIZES:
            raise config.error("group_size", ", ".join(map(str, GROUP_SIZES)))
        config.boolean("zero_point", True)
        for key in ("version", "format", "checkpoint_format"):
            config.choice(key, _LAYOUTS, default="gemm")
        config.choice("method", ("awq",), default="awq")
        if config.raw.get("backend") == "llm-awq":  # packs in an order of its own; the others only name kernels
            raise config.error("backend", "autoawq")
        config.choice("pack_dtype", ("int32",), default="int32")
        if config.boolean("lm_head", False):
            raise config.error("lm_head", "false: the gemm layout leaves the head as it is")
        modules = config.strings("modules_to_not_convert")
        unconverted = find_unquantized(names, modules, "qweight") if names else modules
        unconverted = (*unconverted, *layers_left_out(config, names))
        return cls(group_size, quantizes_head=head_is_quantized(config, names), unconverted=unconverted)

    @property
    def name(self) -> str:
        return f"awq-int{self.bits}" + (f"-g{self.group_size}" if self.group_size > 0 else "")

    def tensors(self, linear: LinearSpec) -> dict[str, TensorSpec]:
        if is_within_modules(linear.name, self.unconverted):
            return Dense().tensors(linear)
        outputs, inputs, group = linear.out_features, linear.in_features, group_columns(linear, self.group_size)
        check_packed_sizes(linear, PER_WORD, outputs)
        bias = {f"{linear.name}.bias": TensorSpec((outputs,), FLOAT_DTYPES)} if linear.bias else {}
        return {
            f"{linear.name}.qweight": TensorSpec((inputs, outputs // PER_WORD), INT_DTYPES),
            f"{linear.name}.qzeros": TensorSpec((inputs // group, outputs // PER_WORD), INT_DTYPES),
            f"{linear.name}.scales": TensorSpec((inputs // group, outputs), FLOAT_DTYPES, problem=scales_problem),
            **bias,
        }

    def linear(self, weights: WeightLoader, linear: LinearSpec, dtype: torch.dtype) -> DenseWeight | GroupedWeight:
        name = linear.name
        if is_within_modules(name, self.unconverted):
            return Dense().linear(weights, linear, dtype)
        group = group_columns(linear, self.group_size)
        packed, of_group = linear.outputs(PER_WORD), linear.inputs(group)
        codes = _unpack_by_outputs(weights.take(f"{name}.qweight", linear.inputs(), packed))
        return GroupedWeight(
            codes=codes,
            scales=weights.take(f"{name}.scales", of_group, linear.outputs()).clone().t().contiguous(),
            zeros=_unpack_by_outputs(weights.take(f"{name}.qzeros", of_group, packed)),
            bits=BITS,
            group_size=min(group, codes.shape[1]),  # less where a rank has part of a layer that is one group
            bias=take_bias(weights, linear, dtype),
        )

    def units(self, linear: LinearSpec) -> tuple[int, int]:
        if is_within_modules(linear.name, self.unconverted):
            return Dense().units(linear)
        return PER_WORD, 1 if self.group_size == -1 else self.group_size


def _read_either_key(config: JsonFields, key: str, older: str) -> int:
    """Return an integer that AutoAWQ calls `older` in its own file. Raises CheckpointError where both names exist and
    differ.
    """
    found = [config.integer(name, -1, 1 << 20) for name in (key, older) if name in config]
    if len({*found}) > 1:
        raise config.error(older, f"the same as {key}, {found[0]}")
    return found[0] if found else config.integer(key, -1, 1 << 20)


def _unpack_by_outputs(packed: torch.Tensor) -> torch.Tensor:
    """Unpack words, int32 [R, N / 8], to uint8 [N, R], with outputs in their own order."""
    nibbles = unpack_codes(packed, BITS).view(*packed.shape, PER_WORD)
    of_outputs = [ORDER.index(output) for output in range(PER_WORD)]
    return nibbles[:, :, of_outputs].flatten(1).t().contiguous()
