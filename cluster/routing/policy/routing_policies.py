"""Registry of routing policies: a new one is a file and a line here."""

from __future__ import annotations

import random

from ....replicas.errors import InvalidRequest
from .least_load import LeastRequests, WeightedLeastWork
from .predicted_latency import PredictedLatency
from .prefix_affinity import PrefixAffinity
from .random_choice import RandomReplica, TwoChoices
from .round_robin import RoundRobin
from .routing_policy import RoutingPolicy

__all__ = ["DEFAULT_POLICY", "ROUTING_POLICIES", "create_routing_policy"]

ROUTING_POLICIES: dict[str, type[RoutingPolicy]] = {  # by the name that fleet files use
    "predicted_latency": PredictedLatency,
    "round_robin": RoundRobin,
    "random": RandomReplica,
    "least_requests": LeastRequests,
    "two_choices": TwoChoices,
    "prefix_affinity": PrefixAffinity,
    "weighted_least_work": WeightedLeastWork,
}
DEFAULT_POLICY = "predicted_latency"


def create_routing_policy(name: str, rng: random.Random | None = None) -> RoutingPolicy:
    """Return a new policy for one ingress. Raises InvalidRequest for an unknown name."""
    if name not in ROUTING_POLICIES:
        expected = ", ".join(ROUTING_POLICIES)
        raise InvalidRequest(f"policy: {name!r} is not known; expected one of {expected}", param="policy")
    return ROUTING_POLICIES[name](rng or random.Random())
