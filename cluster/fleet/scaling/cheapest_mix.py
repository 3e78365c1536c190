"""Integer program for the cheapest numbers of replicas of each class that serve a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

_COSTLIEST = 1e4  # cost of the costliest class in the program, whatever the currency
_NEVER = 1e-9  # smaller shares count as none
# Tie-break as a share of the highest cost: among mixes with the same cost, the fewest and fastest replicas win. HiGHS
# itself treats mixes as equal that differ by 1e-6 in all, which is far less.
_TIE = 1e-6


@dataclass(frozen=True, slots=True)
class ReplicaClass:
    """A class of replicas.

    share    share of the load that one replica serves; of a class that serves none, no more than `minimum` are used
    minimum  smallest allowed number of replicas
    maximum  largest allowed number of replicas
    """

    cost: float
    share: float
    minimum: int
    maximum: int


def cheapest_counts(classes: Sequence[ReplicaClass], *, min_replicas: int = 0) -> tuple[int, ...]:
    """Return the cheapest numbers of replicas of each class that serve the whole load, at least `min_replicas` in all.

    Returns all allowed replicas if even these cannot. Every replica is assumed to get all kinds of requests alike, so
    classes that are good at one kind are not given only that.
    """
    return _solve_counts(tuple(classes), min_replicas)


@lru_cache(maxsize=64)  # a steady load asks the same each time
def _solve_counts(classes: tuple[ReplicaClass, ...], min_replicas: int) -> tuple[int, ...]:
    useful = [each.share > _NEVER for each in classes]
    ends = [each.maximum if use else each.minimum for each, use in zip(classes, useful, strict=True)]
    shares = np.array([each.share if use else 0.0 for each, use in zip(classes, useful, strict=True)])
    if shares @ ends < 1.0 or sum(end for end, use in zip(ends, useful, strict=True) if use) < min_replicas:
        return tuple(ends)
    dearest = max((each.cost for each in classes), default=0.0) or 1.0
    fastest = max(shares.max(initial=0.0), _NEVER)
    price = [each.cost / dearest + _TIE * (2 - share / fastest) for each, share in zip(classes, shares, strict=True)]
    covering = LinearConstraint(
        np.array([np.minimum(shares, 1.0), np.array(useful, dtype=float)]), lb=[1.0, float(min_replicas)]
    )
    solved = milp(
        _COSTLIEST * np.array(price), constraints=covering, integrality=np.ones(len(classes)),
        bounds=Bounds([each.minimum for each in classes], ends), options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    if solved.x is None:
        raise RuntimeError(f"the integer program was not solved: {solved.message}")
    return tuple(round(count) for count in solved.x)
