"""Which linear kernel stands behind each weight on a CPU, and why.

Adding a kernel: a class or function that builds it, or raises Unsuitable, and a line in a list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ..contract import Linear, Role
from ..weights import Fp8Weight, GroupedWeight, Weight, is_outline
from .linear import NativeDense, as_stored, in_bytes
from .linear_torch import TorchBoth, TorchDense, TorchInt4, TorchInt8
from .rounding import ROUNDING_BOUND, rounding_error
from .setting import Setting, Unsuitable, require

Build = Callable[[Weight, Setting], Linear]
Candidates = list[tuple[Build, str]]

_DENSE: Candidates = [(NativeDense, "summed in one order for any batch"), (TorchDense, "torch's own product")]
_FP8: Candidates = [(build, f"fp8 written out, {why}") for build, why in _DENSE]
_INT8: Candidates = [
    (in_bytes, "a byte a weight, integer sums, the same bits for any batch"),
    (TorchInt8, "integer sums per row, the same bits for any batch"),
]
_AS_STORED: Candidates = [(as_stored, "as stored, integer sums, the same bits for any batch")]
_INT4: Candidates = [*_AS_STORED, (TorchInt4, "4 bits a weight, numerics may be fast")]
_BOTH: Candidates = [*_AS_STORED, (TorchBoth, "int4 for few rows, int8 for many: 1.5 bytes a weight"), *_INT4[1:]]


_probing = threading.Lock()  # the C kernels' threads work for one caller at a time


def choose(weight: Weight, role: Role, setting: Setting) -> tuple[Linear, str]:
    """The first candidate that takes the weight and rounds it within the bound; why it, and why not those before it."""
    refused = []
    for build, why in _candidates(weight, role, setting):
        try:
            linear = build(weight, setting)
            _check_rounding(linear, weight, setting)
        except Unsuitable as reason:
            refused.append(str(reason))
            continue
        return linear, f"{linear.kernel}: {why}" + (f" (before it: {'; '.join(refused)})" if refused else "")
    raise ValueError(f"no kernel for a weight of shape {weight.shape}: {'; '.join(refused)}")


def _check_rounding(linear: Linear, weight: Weight, setting: Setting) -> None:
    """Raise Unsuitable if an integer kernel rounds too much on this very weight."""
    if linear.kernel.endswith("-dense") or is_outline(weight):
        return
    with _probing:
        error = rounding_error(linear, weight, setting.dtype)
    # In whole percents, so that a model's many layers have few reasons between them.
    require(error <= ROUNDING_BOUND, f"{linear.kernel} rounds by {error:.0%}, above its bound of {ROUNDING_BOUND:.1%}")


def _candidates(weight: Weight, role: Role, setting: Setting) -> Candidates:
    if isinstance(weight, Fp8Weight) and role == "layer":
        return _FP8
    if setting.weights == "dense" or (setting.weights is None and setting.dtype == torch.float32):
        return _DENSE
    if not isinstance(weight, GroupedWeight):
        return [*_INT8, *_DENSE] if role == "head" else _DENSE
    first = {"int8": [], "both": _BOTH}.get(setting.weights or "int4", _INT4)
    return [*first, *_INT8, *_DENSE]


def kind(weight: Weight) -> str:
    """How the weight comes, in a word or two."""
    if isinstance(weight, GroupedWeight):
        return f"int{weight.bits} g{weight.group_size}"
    if isinstance(weight, Fp8Weight):
        return "fp8"
    return str(weight.weight.dtype).removeprefix("torch.")
