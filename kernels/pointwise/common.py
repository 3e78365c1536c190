"""What operators that only read and write have in common, whatever they compute."""

from __future__ import annotations

import torch

from ..dtypes import TORCH
from ..operation import Shape
from ..precision import PrecisionPolicy

__all__ = ["TOKENS", "Pointwise", "sizes", "storage", "worst"]

TOKENS = (1, 16, 256, 4096)  # of a step: decodes alone, and with pieces of prompts


class Pointwise:
    """The defaults of an Operation: for every capability, one config for shapes that are near."""

    exact: frozenset[str] = frozenset()

    def refusal(self, policy: PrecisionPolicy) -> str:
        return ""


def storage(policy: PrecisionPolicy) -> tuple[torch.dtype, str]:
    """Of activations, and Triton's word for it."""
    return TORCH[policy.storage], policy.storage


def worst(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest of |found - expected| / bound, in fp64; infinite where one is not a number and the other is."""
    ratios = torch.where(
        found.isnan() & expected.isnan(), 0.0, (found.double() - expected.double()).abs() / bound.double()
    )
    return float(ratios.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def sizes(shape: Shape, *names: str) -> tuple[int, ...]:
    return tuple(int(shape[name]) for name in names)
