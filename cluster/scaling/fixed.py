"""The number of replicas that a person has set."""

from __future__ import annotations

from collections.abc import Mapping

from ..routing.predict import Slo
from .state import Observed, Target
from .steady import set_to

__all__ = ["Fixed"]


class Fixed:
    def __init__(self, slo: Slo, *, replicas: Mapping[str, int] | None = None) -> None:
        """`replicas`: by pool; of the others as many as their target is, within what the fleet file allows."""
        self.slo = slo
        self._replicas = dict(replicas or {})

    def decide(self, observed: Observed) -> tuple[Target, ...]:
        targets: list[Target] = []
        for pool in observed.pools:
            wanted = self._replicas.get(pool.name, pool.target)
            reason = f"fixed at {wanted}, of {pool.minimum} to {pool.maximum}"
            targets += set_to(pool, wanted, reason)
        return tuple(targets)
