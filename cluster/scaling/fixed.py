"""Scaling policy `fixed`: the number of replicas that an operator has set."""

from __future__ import annotations

from collections.abc import Mapping

from ..routing.predict import Slo
from .state import Observed, Target
from .steady import set_to

__all__ = ["Fixed"]


class Fixed:
    def __init__(self, slo: Slo, *, replicas: Mapping[str, int] | None = None) -> None:
        """Create the policy.

        replicas  number of replicas by pool; other pools keep their targets, within their bounds
        """
        self.slo = slo
        self._replicas = dict(replicas or {})

    def decide(self, observed: Observed) -> tuple[Target, ...]:
        targets: list[Target] = []
        for pool in observed.pools:
            wanted = self._replicas.get(pool.name, pool.target)
            reason = f"fixed at {wanted}, of {pool.minimum} to {pool.maximum}"
            targets += set_to(pool, wanted, reason)
        return tuple(targets)
