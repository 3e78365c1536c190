"""Scaling policy `fixed`: the number of replicas that an operator has set."""

from __future__ import annotations

from collections.abc import Mapping

from ...routing.prediction.latency_model import Slo
from .scaling_hysteresis import target_change
from .scaling_policy import FleetObservation, ReplicaTarget


class FixedPolicy:
    def __init__(self, slo: Slo, *, replicas: Mapping[str, int] | None = None) -> None:
        """Create the policy.

        replicas  number of replicas by pool; other pools keep their targets, within their bounds
        """
        self.slo = slo
        self._replicas = dict(replicas or {})

    def decide(self, observed: FleetObservation) -> tuple[ReplicaTarget, ...]:
        targets: list[ReplicaTarget] = []
        for pool in observed.pools:
            replicas = self._replicas.get(pool.name, pool.target)
            reason = f"fixed at {replicas}, of {pool.minimum} to {pool.maximum}"
            targets += target_change(pool, replicas, reason)
        return tuple(targets)
