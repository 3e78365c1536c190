"""What operators that only read and write have in common, whatever they compute."""

from __future__ import annotations

import torch

from ..operation import Shape
from ..precision import PrecisionPolicy

__all__ = ["ROUNDING", "TOKENS", "Pointwise", "smallest", "storage", "worst"]

TOKENS = (1, 16, 256, 4096)  # of a step: decodes alone, and with pieces of prompts
# Half a unit in the last place; a whole one of bf16, which Triton's interpreter cuts off where its compiler rounds.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-24}


class Pointwise:
    """The defaults of an Operation: for every capability, one config for shapes that are near."""

    exact: frozenset[str] = frozenset()

    def refusal(self, policy: PrecisionPolicy) -> str:
        return ""


def storage(policy: PrecisionPolicy) -> tuple[torch.dtype, str]:
    """Of activations, and Triton's word for it."""
    return (torch.bfloat16, "bf16") if policy.storage == "bf16" else (torch.float16, "fp16")


def smallest(dtype: torch.dtype) -> float:
    """Half the distance of neighbours around zero: what rounding may take from any result."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps


def worst(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest of |found - expected| / bound, in fp64; infinite where one is not a number and the other is."""
    ratios = torch.where(
        found.isnan() & expected.isnan(), 0.0, (found.double() - expected.double()).abs() / bound.double()
    )
    return float(ratios.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def sizes(shape: Shape, *names: str) -> tuple[int, ...]:
    return tuple(int(shape[name]) for name in names)
