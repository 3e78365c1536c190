"""Dtypes by the names that policies and Triton use for them, and the rounding error of each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "i8": torch.int8, "i32": torch.int32
}  # fmt: skip
ROUNDING_UNIT: Mapping[torch.dtype, float] = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""Half a unit in the last place of 1: the relative error of one rounding."""

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def type_name(tensor: torch.Tensor) -> str:
    """Triton type name of a tensor's elements."""
    return _NAMES[tensor.dtype]


def rounding_unit_of(found: torch.Tensor) -> float:
    """Relative error of a kernel's last rounding: twice ROUNDING_UNIT for bf16 in the interpreter, which truncates."""
    return ROUNDING_UNIT[found.dtype] * (2 if found.dtype == torch.bfloat16 and not found.is_cuda else 1)


def smallest_spacing(dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers around zero: the largest absolute error of rounding a subnormal result."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps
