"""Shapes of a load: how the number of users changes over time, from the number that Locust was given as the peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

__all__ = ["NONE", "SHAPES", "users_at"]

Share = Callable[[float], float]  # share of the users at a point of the period, from 0 to 1

NONE = "none"  # all users, all the time
BURST = 0.1  # share of the period in which there are ten times as many
LOW = 0.1


def _spike(at: float) -> float:
    return 1.0 if 0.4 <= at < 0.6 else LOW


SHAPES: Mapping[str, Share] = {
    NONE: lambda at: 1.0,
    "steady": lambda at: 1.0,
    "ramp": lambda at: at,
    "spike": _spike,  # a fifth of the period in its middle
    "sawtooth": lambda at: 2 * at if at < 0.5 else 2 * at - 1,  # up twice in a period, and down at once
    "burst": lambda at: 1.0 if at % 0.5 < BURST else LOW,  # ten times as many, twice in a period
}


def users_at(shape: str, peak: int, run_s: float, period_s: float) -> int:
    """Return the number of users after so many seconds; at least one."""
    return max(1, math.ceil(peak * SHAPES[shape]((run_s % period_s) / period_s)))
