"""Counts of a fleet's replicas as they are and as they should be, as metrics export them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

from ...replicas.host.metric_fields import counter, gauge

__all__ = ["ReplicaCount", "ScalingCounts"]

UP, DOWN = DIRECTIONS = ("up", "down")
POLICY, OPERATOR = AUTHORS = ("policy", "operator")


@dataclass(slots=True, eq=False)
class ReplicaCount:
    """Count of one replica, whose sum is how many there are of its class."""

    serving: int = field(default=1, metadata=gauge("num_replicas", "Replicas that serve"))


@dataclass(slots=True, eq=False)
class ScalingCounts:
    """State of a pool as the control plane sees it, and the decisions about its number of replicas since that began.

    decisions  numbers of decisions by direction and author
    """

    wanted: int = field(
        default=0, metadata=gauge("num_replicas_wanted", "Replicas that the pool is to have, as was decided last")
    )
    starting: int = field(
        default=0, metadata=gauge("num_replicas_starting", "Replicas that load their model, or wait for a place")
    )
    draining: int = field(
        default=0, metadata=gauge("num_replicas_draining", "Replicas that end what they have begun, before they go")
    )
    decisions: Counter[tuple[str, str]] = field(
        default_factory=lambda: Counter(dict.fromkeys(product(DIRECTIONS, AUTHORS), 0)),
        metadata=counter(
            "scaling_decisions",
            "Changes of the number of replicas that a pool is to have, by direction and by who decided",
            labels=("direction", "by"),
        ),
    )

    def decided(self, before: int, after: int, *, by_policy: bool) -> None:
        self.decisions[UP if after > before else DOWN, POLICY if by_policy else OPERATOR] += 1
