"""FP8 checkpoints: weights in e4m3, with a scale for each block of 128 x 128, for each output or for all.

Of a layer [N, K]:

    weight            e4m3 [N, K]
    weight_scale_inv  float [ceil(N / 128), ceil(K / 128)]   where `weight_block_size` is [128, 128]
    weight_scale      float [N, 1], [1] or none              elsewhere

w[n, k] = scale * weight[n, k]: both are multiplied by, whatever the name says. Activations are rounded to e4m3 row by
row when they come ("dynamic"); scales for them that are in the checkpoint ("static") are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.weights import FP8_BLOCK, DenseWeight, Fp8Weight, blocks_of
from ..json_file import Fields
from ..weights import Weights, told
from .base import FLOATS, LinearSpec, TensorSpec, is_part
from .dense import Dense, bias_of

LARGEST = 448.0  # of e4m3

_READ = frozenset(
    {
        *("quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert"),
        *("ignored_layers", "scale_fmt"),
    }
)
# Of experts, which no family here has, and of how transformers is to load it.
_HISTORY = frozenset({"expert_dtype", "dequantize"})


@dataclass(frozen=True, slots=True)
class FP8:
    """One checkpoint's flavour of FP8.

    in_blocks    whether scales are of blocks
    unconverted  modules whose layers are not in fp8
    """

    in_blocks: bool
    unconverted: tuple[str, ...] = ()
    quantizes_head: bool = False

    @classmethod
    def read(cls, config: Fields) -> FP8:
        """From the `quantization_config` of config.json.

        Raises CheckpointError naming a key that asks for what is not supported or not understood.
        """
        config.refuse_unknown(_READ | _HISTORY)
        config.choice("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
        config.choice("activation_scheme", ("dynamic",), default="dynamic")
        config.choice("scale_fmt", ("float",), default="float")
        block = config.integers("weight_block_size", 1, 1 << 20)
        if block not in ((), (FP8_BLOCK, FP8_BLOCK)):
            raise config.error("weight_block_size", f"[{FP8_BLOCK}, {FP8_BLOCK}], or null for scales of rows or of all")
        unconverted = config.strings("modules_to_not_convert") + config.strings("ignored_layers")
        return cls(in_blocks=bool(block), unconverted=unconverted)

    @property
    def name(self) -> str:
        return "fp8-e4m3" + (f"-b{FP8_BLOCK}" if self.in_blocks else "")

    def tensors(self, linear: LinearSpec) -> dict[str, TensorSpec]:
        if is_part(linear.name, self.unconverted):
            return Dense().tensors(linear)
        outputs, inputs = linear.out_features, linear.in_features
        scales = (
            TensorSpec(blocks_of(outputs, inputs), FLOATS)
            if self.in_blocks
            else TensorSpec((), FLOATS, others=((1,), (1, 1), (outputs, 1)))
        )
        bias = {f"{linear.name}.bias": TensorSpec((outputs,), FLOATS)} if linear.bias else {}
        codes = TensorSpec((outputs, inputs), frozenset({"F8_E4M3"}), problem=_codes_problem)
        return {f"{linear.name}.weight": codes, f"{linear.name}.{self._scales}": scales, **bias}

    def linear(self, weights: Weights, linear: LinearSpec, dtype: torch.dtype) -> DenseWeight | Fp8Weight:
        if is_part(linear.name, self.unconverted):
            return Dense().linear(weights, linear, dtype)
        name = f"{linear.name}.{self._scales}"
        scales = self._take_scales(weights, linear, name).clone()
        if told(scales, lambda each: each.abs().amax() * LARGEST > torch.finfo(dtype).max, outlined=False):
            raise weights.error(name, f"has weights beyond {str(dtype).removeprefix('torch.')}")
        return Fp8Weight(
            codes=weights.take(f"{linear.name}.weight", linear.outputs(), linear.inputs()).clone(),
            scales=scales if self.in_blocks else scales.view(-1, 1),
            bias=bias_of(weights, linear, dtype),
        )

    def units(self, linear: LinearSpec) -> tuple[int, int]:
        in_blocks = self.in_blocks and not is_part(linear.name, self.unconverted)
        return (FP8_BLOCK, FP8_BLOCK) if in_blocks else (1, 1)

    def _take_scales(self, weights: Weights, linear: LinearSpec, name: str) -> torch.Tensor:
        if self.in_blocks:
            return weights.take(name, linear.outputs(FP8_BLOCK), linear.inputs(FP8_BLOCK))
        of_rows = weights.shape(name) == (linear.out_features, 1)
        return weights.take(name, linear.outputs()) if of_rows else weights.take(name)

    @property
    def _scales(self) -> str:
        return "weight_scale_inv" if self.in_blocks else "weight_scale"


def _codes_problem(codes: torch.Tensor) -> str | None:
    """e4m3 has no infinities, and NaN as all ones, whatever the sign."""
    nan = codes.view(torch.uint8).bitwise_and(0x7F) == 0x7F
    return "has weights that are NaN" if bool(nan.any()) else None
