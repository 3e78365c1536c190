"""Base class and helpers of pointwise operators, which mainly read and write, whatever they compute."""

from __future__ import annotations

import torch

from ..device.dtypes import TORCH_DTYPES
from ..device.precision import PrecisionPolicy
from ..launch.kernel_operation import ProblemShape

TOKENS = (1, 16, 256, 4096)  # tokens of a step: decodes alone, and with chunks of prompts


class PointwiseOperation:
    """Defaults of a pointwise operator: it supports every capability, and nearby shapes share a config."""

    exact: frozenset[str] = frozenset()

    def refusal(self, policy: PrecisionPolicy) -> str:
        return ""


def storage_dtype(policy: PrecisionPolicy) -> tuple[torch.dtype, str]:
    """Return the dtype of activations and its Triton type name."""
    return TORCH_DTYPES[policy.storage], policy.storage


def worst_ratio(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest |found - expected| / bound, in fp64; infinite where exactly one of the two is NaN."""
    ratios = torch.where(
        found.isnan() & expected.isnan(), 0.0, (found.double() - expected.double()).abs() / bound.double()
    )
    return float(ratios.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def shape_sizes(shape: ProblemShape, *names: str) -> tuple[int, ...]:
    return tuple(int(shape[name]) for name in names)
