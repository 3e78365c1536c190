"""Routing policies that draw replicas at random, from all that there are."""

from __future__ import annotations

from ..prediction.routing_candidates import RoutingCandidates
from ..prediction.routing_query import RoutingQuery
from .routing_policy import RoutingPolicy

__all__ = ["MAX_DRAWN", "RandomReplica", "TwoChoices"]

MAX_DRAWN = 128  # maximum replicas that are drawn, or visited on a ring, for one request


class RandomReplica(RoutingPolicy):
    """Any replica, at random."""

    def order(self, query: RoutingQuery, replicas: RoutingCandidates) -> list[int]:
        rows: list[int] = replicas.rows.tolist()
        return self.rng.sample(rows, min(len(rows), MAX_DRAWN))


class TwoChoices(RandomReplica):
    """Less loaded of two replicas that are drawn at random, as in Ray Serve's own router."""

    def order(self, query: RoutingQuery, replicas: RoutingCandidates) -> list[int]:
        drawn, in_flight = super().order(query, replicas), replicas.in_flight
        pairs = (drawn[at : at + 2] for at in range(0, len(drawn), 2))
        return [row for pair in pairs for row in sorted(pair, key=lambda each: float(in_flight[each]))]
