"""Choice of the linear kernel for each weight on a CPU, with its reason.

To add a kernel, write a class or function that builds it, or raises UnsuitableKernel, and add a line to a list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ...canonical_weights import Fp8Weight, GroupedWeight, Weight, is_meta_weight
from ...contract import Linear, Role
from .linear_settings import CpuLinearSettings, UnsuitableKernel, require_suitable
from .native_linear import NativeDenseLinear, build_as_stored, build_int8
from .rounding_probe import ROUNDING_BOUND, rounding_error
from .torch_linear import TorchDenseLinear, TorchInt4Int8Linear, TorchInt4Linear, TorchInt8Linear

LinearBuilder = Callable[[Weight, CpuLinearSettings], Linear]
LinearCandidates = list[tuple[LinearBuilder, str]]

_DENSE: LinearCandidates = [
    (NativeDenseLinear, "summed in one order for any batch"),
    (TorchDenseLinear, "torch's own product"),
]
_FP8: LinearCandidates = [(build, f"fp8 written out, {why}") for build, why in _DENSE]
_INT8: LinearCandidates = [
    (build_int8, "a byte a weight, integer sums, the same bits for any batch"),
    (TorchInt8Linear, "integer sums per row, the same bits for any batch"),
]
_AS_STORED: LinearCandidates = [(build_as_stored, "as stored, integer sums, the same bits for any batch")]
_INT4: LinearCandidates = [*_AS_STORED, (TorchInt4Linear, "4 bits a weight, numerics may be fast")]
_BOTH: LinearCandidates = [
    *_AS_STORED,
    (TorchInt4Int8Linear, "int4 for few rows, int8 for many: 1.5 bytes a weight"),
    *_INT4[1:],
]


_probing = threading.Lock()  # the C kernels' thread pool serves one caller at a time


def choose_linear(weight: Weight, role: Role, setting: CpuLinearSettings) -> tuple[Linear, str]:
    """Return the layer of the first candidate that accepts the weight and rounds it within the bound, and the reason.

    The reason also says why the candidates before it were not chosen. Raises ValueError if no candidate fits.
    """
    refused = []
    for build, why in _candidates(weight, role, setting):
        try:
            linear = build(weight, setting)
            _check_rounding(linear, weight, setting)
        except UnsuitableKernel as reason:
            refused.append(str(reason))
            continue
        return linear, f"{linear.kernel}: {why}" + (f" (before it: {'; '.join(refused)})" if refused else "")
    raise ValueError(f"no kernel accepts a weight of shape {weight.shape}: {'; '.join(refused)}")


def _check_rounding(linear: Linear, weight: Weight, setting: CpuLinearSettings) -> None:
    """Raise UnsuitableKernel if an integer kernel rounds this weight by more than the bound."""
    if linear.kernel.endswith("-dense") or is_meta_weight(weight):
        return
    with _probing:
        error = rounding_error(linear, weight, setting.dtype)
    # Rounded to whole percents, so that the many layers of a model give only few different reasons.
    require_suitable(
        error <= ROUNDING_BOUND, f"{linear.kernel} rounds by {error:.0%}, above its bound of {ROUNDING_BOUND:.1%}"
    )


def _candidates(weight: Weight, role: Role, setting: CpuLinearSettings) -> LinearCandidates:
    if isinstance(weight, Fp8Weight) and role == "layer":
        return _FP8
    if setting.weights == "dense" or (setting.weights is None and setting.dtype == torch.float32):
        return _DENSE
    if not isinstance(weight, GroupedWeight):
        return [*_INT8, *_DENSE] if role == "head" else _DENSE
    first = {"int8": [], "both": _BOTH}.get(setting.weights or "int4", _INT4)
    return [*first, *_INT8, *_DENSE]


def weight_kind(weight: Weight) -> str:
    """Short name of a weight's format, e.g. "int4 g128", "fp8" or "bfloat16"."""
    if isinstance(weight, GroupedWeight):
        return f"int{weight.bits} g{weight.group_size}"
    if isinstance(weight, Fp8Weight):
        return "fp8"
    return str(weight.weight.dtype).removeprefix("torch.")
