"""What the choice of a linear kernel on a CPU depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..contract import CpuWeights, Numerics
from ..weights import GroupedWeight, Weight
from .native import Native
from .pack import round_to_int8

INT8_ERROR = 0.02  # of round_to_int8, above which int8 is not chosen


@dataclass(frozen=True, slots=True)
class Setting:
    """What the choice depends on beside the weight."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    numerics: Numerics
    weights: CpuWeights | None
    native: Native | None


class Unsuitable(Exception):
    """Why a kernel does not take this weight."""


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Unsuitable(otherwise)


def within_int8(weight: Weight, group: int) -> GroupedWeight:
    """The weights rounded to int8 in groups of `group` inputs. Raises Unsuitable if that changes them too much."""
    rounded, error = round_to_int8(weight, group)
    require(error <= INT8_ERROR, f"int8 would change the weights by {error:.1%}, above its bound of {INT8_ERROR:.0%}")
    return rounded
