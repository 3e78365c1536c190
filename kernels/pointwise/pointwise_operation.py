"""What operators that only read and write have in common, whatever they compute."""

from __future__ import annotations

import torch

from ..device.dtypes import TORCH_DTYPES
from ..device.precision import PrecisionPolicy
from ..launch.kernel_operation import ProblemShape

__all__ = ["TOKENS", "PointwiseOperation", "shape_sizes", "storage_dtype", "worst_ratio"]

TOKENS = (1, 16, 256, 4096)  # of a step: decodes alone, and with pieces of prompts


class PointwiseOperation:
    """The defaults of an Operation: for every capability, one config for shapes that are near."""

    exact: frozenset[str] = frozenset()

    def refusal(self, policy: PrecisionPolicy) -> str:
        return ""


def storage_dtype(policy: PrecisionPolicy) -> tuple[torch.dtype, str]:
    """Of activations, and Triton's word for it."""
    return TORCH_DTYPES[policy.storage], policy.storage


def worst_ratio(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest of |found - expected| / bound, in fp64; infinite where one is not a number and the other is."""
    ratios = torch.where(
        found.isnan() & expected.isnan(), 0.0, (found.double() - expected.double()).abs() / bound.double()
    )
    return float(ratios.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def shape_sizes(shape: ProblemShape, *names: str) -> tuple[int, ...]:
    return tuple(int(shape[name]) for name in names)
