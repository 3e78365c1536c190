"""Linear layers on a CPU by torch's operators: used without a C compiler, and for the fast dense product."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ...canonical_weights import DenseWeight, GroupedWeight, Weight, center_codes
from ...layer_memory import LayerMemory, total_nbytes
from .cpu_packing import dequantized, regroup, round_to_int8
from .linear_settings import CpuLinearSettings, require_int8, require_suitable

_EXACT_ROWS = 16  # rows of a product in exact numerics


class TorchDenseLinear:
    """Linear layer by torch's own product.

    In exact numerics rows are padded to a multiple of 16, since torch uses other code paths for fewer rows.
    """

    kernel = "torch-dense"

    def __init__(self, weight: Weight, setting: CpuLinearSettings) -> None:
        self._weight = dequantized(weight).to(setting.dtype).contiguous()
        self._bias = None if weight.bias is None else weight.bias.to(setting.dtype)
        self._padded, self._out = setting.numerics == "exact", setting.out_dtype
        given = self._weight is weight.weight if isinstance(weight, DenseWeight) else False
        self.held = LayerMemory(
            total_nbytes(self._weight, self._bias), given=total_nbytes(self._weight) if given else 0
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._padded:
            return F.linear(x, self._weight, self._bias).to(self._out)
        rows = x.shape[0]
        x = F.pad(x, (0, 0, 0, -rows % _EXACT_ROWS))
        parts = [F.linear(part, self._weight, self._bias) for part in torch.split(x, _EXACT_ROWS)]
        return torch.cat(parts)[:rows].to(self._out)


def _int8_product(codes: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return fp32 [M, N]: codes uint8 [M, K] around 128 in units of 1 / 127, times a packed int8 weight."""
    y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1 / 127, 128, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


@functools.cache
def _int8_refusal() -> str:
    """Reason why oneDNN's int8 product cannot be used on this machine; empty if it can.

    On CPUs without VNNI it adds pairs of products in 16 bits, which the largest values overflow: this is tried here.
    """
    largest, zeros = torch.full((1, 64), 255, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64)
    try:
        weight = torch.ops.onednn.qlinear_prepack(torch.full((16, 64), 127, dtype=torch.int8), None)
        y = _int8_product(largest, weight, torch.ones(16), zeros)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"oneDNN's int8 product does not run here: {str(error).splitlines()[0]}"
    right = torch.allclose(y, torch.full_like(y, 64 * 127.0))
    return "" if right else "oneDNN's int8 product overflows on this CPU"


class TorchInt8Linear:
    """Linear layer by oneDNN's int8 product, with weights rounded to int8 per output and x per row.

    Every row of x is scaled to +-1 and rounded to uint8 around 128, so that one constant scale serves all rows, and no
    row affects another. It is exact in the sense of `numerics`, since sums are integers. Error bound: weights within
    INT8_ERROR, y within 3% for x without outliers. Weights with more than a few hundred inputs usually have too wide a
    range for one scale per output: they fail the check against ROUNDING_BOUND.
    """

    kernel = "onednn-int8"

    def __init__(self, weight: Weight, setting: CpuLinearSettings) -> None:
        self._out = setting.out_dtype
        require_suitable(not _int8_refusal(), _int8_refusal())
        rounded, error = round_to_int8(weight, weight.shape[1])
        require_int8(error)
        codes = center_codes(rounded.codes)
        self._weight = codes if codes.is_meta else torch.ops.onednn.qlinear_prepack(codes, None)
        self._scales = rounded.scales[:, 0].contiguous()
        self._zeros = torch.zeros_like(self._scales, dtype=torch.int64)
        self._bias = None if weight.bias is None else weight.bias.float()
        self.held = LayerMemory(total_nbytes(codes, self._bias), total_nbytes(self._scales, self._zeros))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        peak = wide.abs().amax(dim=1, keepdim=True)
        scaled = wide * torch.where(peak > 0, 127 / peak, 0)
        codes = (scaled.round_() + 128).to(torch.uint8)
        y = _int8_product(codes, self._weight, self._scales, self._zeros)
        y = y * peak
        biased: torch.Tensor = y if self._bias is None else y + self._bias
        return biased.to(self._out)


class TorchInt4Linear:
    """Linear layer by torch's int4 product with bf16 activations, for few rows, and only if numerics may be "fast".

    Error bound: y is within 1% of the product in fp32 (scales and zero points are rounded to bf16).
    """

    kernel = "torch-int4"

    def __init__(self, weight: Weight, setting: CpuLinearSettings) -> None:
        require_suitable(isinstance(weight, GroupedWeight) and weight.bits == 4, "the weights are not 4-bit")
        assert isinstance(weight, GroupedWeight)
        require_suitable(setting.dtype == torch.bfloat16, "50 times slower unless activations are bf16")
        require_suitable(setting.numerics == "fast", "its sums depend on the number of rows")
        if weight.group_size == weight.shape[1] and weight.shape[1] % 128 == 0:
            weight = regroup(weight, 128)
        require_suitable(weight.group_size in (32, 64, 128, 256), f"group size {weight.group_size}")
        require_suitable(weight.shape[0] % 16 == 0, f"{weight.shape[0]} outputs are no multiple of 16")
        self._group, self._order, self._out = weight.group_size, weight.permutation, setting.out_dtype
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        scales = weight.scales.float()
        if scales.is_meta:  # a meta tensor: only the shape counts, see `center_codes`
            pairs = scales.new_empty(*scales.shape, 2)
        else:  # w = (code - 8) * scale + offset
            pairs = torch.stack((scales, (8 - weight.zeros.float()) * scales), dim=-1)
        self._scales = pairs.transpose(0, 1).contiguous().bfloat16()
        self._bias = None if weight.bias is None else weight.bias.to(setting.dtype)
        self.held = LayerMemory(total_nbytes(self._weight, self._bias), total_nbytes(self._scales, self._order))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._order is not None:
            x = x[:, self._order]
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._weight, self._group, self._scales)
        return (y if self._bias is None else y + self._bias).to(self._out)


class TorchInt4Int8Linear:
    """Linear layer that holds a weight in int4 for few rows and in int8 for many: 1.5 bytes per weight."""

    kernel = "torch-int4+onednn-int8"
    CROSSOVER = 8  # rows from which int8 is faster

    def __init__(self, weight: Weight, setting: CpuLinearSettings) -> None:
        self._few, self._many = TorchInt4Linear(weight, setting), TorchInt8Linear(weight, setting)
        self.held = self._few.held + self._many.held

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._few(x) if x.shape[0] < self.CROSSOVER else self._many(x)
