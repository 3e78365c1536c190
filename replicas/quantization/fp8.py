"""FP8 checkpoints: weights in e4m3, with a scale for each block of 128 x 128, for each output, or for all.

A layer [N, K] has:

    weight            e4m3 [N, K]
    weight_scale_inv  float [ceil(N / 128), ceil(K / 128)]   where `weight_block_size` is [128, 128]
    weight_scale      float [N, 1], [1, 1], [1] or []        elsewhere

Some writers use the one name where others use the other: the names of the file's tensors decide.

w[n, k] = scale * weight[n, k]: scales of either name are multiplied by. Activations are rounded to e4m3 row by row as
they are computed ("dynamic"); checkpoints with scales for activations ("static") are refused.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ...kernels.canonical_weights import FP8_BLOCK, DenseWeight, Fp8Weight, num_scale_blocks
from ..checkpoint.files.json_fields import JsonFields
from ..checkpoint.reading.weight_loader import WeightLoader, satisfies
from .config_keys import check_config_keys
from .dense import Dense, take_bias
from .weight_format import FLOAT_DTYPES, LinearSpec, TensorSpec, find_unquantized, is_within_modules

MAX_E4M3 = 448.0  # largest number of e4m3
INVERSE, SCALE = "weight_scale_inv", "weight_scale"

_READ = frozenset(
    {
        *("quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert"),
        *("ignored_layers", "scale_fmt", "bits", "sym", "group_size"),
        *("data_type", "act_bits", "act_data_type", "act_dynamic", "act_sym"),
    }
)


@dataclass(frozen=True, slots=True)
class FP8:
    """FP8 format with one checkpoint's settings.

    in_blocks    whether scales are of blocks
    unconverted  names of modules whose layers are not in fp8
    scale        last part of the name of scales
    """

    in_blocks: bool
    unconverted: tuple[str, ...] = ()
    scale: str = SCALE
    quantizes_head: bool = False

    @classmethod
    def read(cls, config: JsonFields, names: Collection[str] = ()) -> FP8:
        """Return the format from the `quantization_config` of config.json.

        names  names of the checkpoint's tensors, which show what scales are called and which layers are not in fp8

        Raises CheckpointError naming a key that asks for what is not supported or not understood.
        """
        check_config_keys(config, _READ)
        _check_autoround(config)
        config.choice("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
        config.choice("activation_scheme", ("dynamic",), default="dynamic")
        config.choice("scale_fmt", ("float",), default="float")
        block = config.integers("weight_block_size", 1, 1 << 20)
        if block not in ((), (FP8_BLOCK, FP8_BLOCK)):
            raise config.error("weight_block_size", f"[{FP8_BLOCK}, {FP8_BLOCK}], or null for scales of rows or of all")
        modules = config.strings("modules_to_not_convert") + config.strings("ignored_layers")
        found = [scale for scale in (INVERSE, SCALE) if any(name.endswith(f".{scale}") for name in names)]
        scale = found[0] if found else INVERSE if block else SCALE
        return cls(bool(block), find_unquantized(names, modules, scale) if names else modules, scale)

    @property
    def name(self) -> str:
        return "fp8-e4m3" + (f"-b{FP8_BLOCK}" if self.in_blocks else "")

    def tensors(self, linear: LinearSpec) -> dict[str, TensorSpec]:
        if is_within_modules(linear.name, self.unconverted):
            return Dense().tensors(linear)
        outputs, inputs = linear.out_features, linear.in_features
        scales = (
            TensorSpec(num_scale_blocks(outputs, inputs), FLOAT_DTYPES)
            if self.in_blocks
            else TensorSpec((), FLOAT_DTYPES, others=((1,), (1, 1), (outputs, 1)))
        )
        bias = {f"{linear.name}.bias": TensorSpec((outputs,), FLOAT_DTYPES)} if linear.bias else {}
        codes = TensorSpec((outputs, inputs), frozenset({"F8_E4M3"}), problem=_codes_problem)
        return {f"{linear.name}.weight": codes, f"{linear.name}.{self.scale}": scales, **bias}

    def linear(self, weights: WeightLoader, linear: LinearSpec, dtype: torch.dtype) -> DenseWeight | Fp8Weight:
        if is_within_modules(linear.name, self.unconverted):
            return Dense().linear(weights, linear, dtype)
        name = f"{linear.name}.{self.scale}"
        scales = self._take_scales(weights, linear, name).clone()
        if satisfies(scales, lambda each: each.abs().amax() * MAX_E4M3 > torch.finfo(dtype).max, outlined=False):
            raise weights.error(name, f"has weights beyond {str(dtype).removeprefix('torch.')}")
        return Fp8Weight(
            codes=weights.take(f"{linear.name}.weight", linear.outputs(), linear.inputs()).clone(),
            scales=scales if self.in_blocks else scales.view(-1, 1),
            bias=take_bias(weights, linear, dtype),
        )

    def units(self, linear: LinearSpec) -> tuple[int, int]:
        in_blocks = self.in_blocks and not is_within_modules(linear.name, self.unconverted)
        return (FP8_BLOCK, FP8_BLOCK) if in_blocks else (1, 1)

    def _take_scales(self, weights: WeightLoader, linear: LinearSpec, name: str) -> torch.Tensor:
        if self.in_blocks:
            return weights.take(name, linear.outputs(FP8_BLOCK), linear.inputs(FP8_BLOCK))
        of_rows = weights.shape(name) == (linear.out_features, 1)
        return weights.take(name, linear.outputs()) if of_rows else weights.take(name)


def _check_autoround(config: JsonFields) -> None:
    """Check keys of auto-round that repeat the format in its own words: 8 bits, and activations that are rounded
    dynamically.

    Raises CheckpointError for other values.
    """
    config.choice("data_type", ("fp", "fp8"), default="fp")
    config.choice("act_data_type", ("fp", "fp8"), default="fp")
    for key in ("bits", "act_bits"):
        if config.integer(key, 1, 64, default=8) != 8:
            raise config.error(key, "8")
    if not config.boolean("act_dynamic", True):
        raise config.error("act_dynamic", "true: scales of activations are found when they come")


def _codes_problem(codes: torch.Tensor) -> str | None:
    """Return a problem with NaN among codes. e4m3 has no infinities, and NaN has all bits set but the sign, which may
    be either.
    """
    nan = codes.view(torch.uint8).bitwise_and(0x7F) == 0x7F
    return "has weights that are NaN" if bool(nan.any()) else None
