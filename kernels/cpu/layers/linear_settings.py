"""Settings and exceptions of the choice of a linear kernel on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...contract import CpuWeights, Numerics
from ..c_kernels.native_kernels import NativeKernels

INT8_ERROR = 0.02  # error of round_to_int8 above which int8 is not chosen


@dataclass(frozen=True, slots=True)
class CpuLinearSettings:
    """Settings on which the choice of a linear kernel depends, beside the weight."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    numerics: Numerics
    weights: CpuWeights | None
    native: NativeKernels | None


class UnsuitableKernel(Exception):
    """Reason why a kernel does not accept a weight."""


def require_suitable(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnsuitableKernel(otherwise)


def require_int8(error: float) -> None:
    """Raise UnsuitableKernel if the `error` of rounding to int8 changes the weights too much."""
    require_suitable(
        error <= INT8_ERROR, f"int8 would change the weights by {error:.1%}, above its bound of {INT8_ERROR:.0%}"
    )
