"""Bounds on the rounding error of every number that a CPU's operators write in bf16, compared with the exact result."""

from __future__ import annotations

import torch

from motley.kernels.canonical_weights import GroupedWeight, Weight
from motley.kernels.cpu.layers.cpu_packing import dequantized_rows

HALF = 2.0**-8  # largest relative change by rounding to bf16
STEP = 2.0**-24  # largest relative change by rounding to fp32
# Rounding errors of many terms add up like random numbers: a sum of independent errors with mean 0, each at most b,
# exceeds _CHANCE times the root of the sum of b**2 once in 2**50 times (Hoeffding 1963; for fp32 sums Higham and Mary,
# 2019).
_CHANCE = 8.41
_COLUMNS = 4096  # columns of y that are checked together


def worst_ratio(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest |found - expected| / bound; infinite for NaN or if the shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    ratios = (found.double() - expected.double()).abs() / bound.double()
    return float(ratios.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def linear_error(x: torch.Tensor, weight: Weight, kernel: str, found: torch.Tensor) -> float:
    """Return the largest ratio of the error of y [M, N] = x @ w.T to its bound, compared with fp32.

    Kernels with "int" in their name round x, in 254 steps between the negative and the positive absmax of a row or of a
    part of it. Weights of other kinds are rounded to int8 in the same way; dense kernels round them to bf16; torch's
    int4 kernel has scales and zero points in bf16. At the end y is rounded.
    """
    (num_outputs, num_inputs), wide = weight.shape, x.float()
    largest, length = wide.abs().amax(1, keepdim=True), wide.norm(dim=1, keepdim=True)
    of_x = largest / 254 if "int" in kernel else torch.zeros_like(largest)
    ratio = 0.0
    for start in range(0, num_outputs, _COLUMNS):
        rows = torch.arange(start, min(start + _COLUMNS, num_outputs))
        dense = dequantized_rows(weight, rows)
        exact, size = wide @ dense.T, dense.norm(dim=1)
        of_weight = _rounded(weight, kernel, dense, rows)
        terms = (of_x * size) ** 2 + (length * of_weight) ** 2 + (num_inputs**0.5 * STEP * length * size) ** 2
        bound = _CHANCE * terms.sqrt() + HALF * exact.abs() + 1e-30
        ratio = max(ratio, worst_ratio(found[:, rows], exact, bound))
    return ratio


def _rounded(weight: Weight, kernel: str, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return, per row, the largest difference of a kernel's weights to `dense` [R, K]."""
    largest = dense.abs().amax(1)
    if "dense" in kernel:
        return HALF * largest
    if "int8" in kernel and not (kernel.startswith("c-") and isinstance(weight, GroupedWeight)):
        return largest / 254
    if "torch-int4" in kernel and isinstance(weight, GroupedWeight):
        return 2 * HALF * 16 * weight.scales[rows].float().abs().amax(1)
    return torch.zeros_like(largest)
