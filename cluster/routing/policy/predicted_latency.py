"""Motley's own routing policy: the replica that is predicted to serve the request best."""

from __future__ import annotations

from collections.abc import Sequence

from ..prediction.routing_candidates import RoutingCandidates
from ..prediction.routing_query import RoutingQuery
from .routing_policy import RANKS, RoutingPolicy

__all__ = ["PredictedLatency"]

_NEAR = 0.05  # predictions that differ by less than this share count as equal, and are ordered at random


class PredictedLatency(RoutingPolicy):
    """Replica whose predicted latency takes the least of the objectives or, without any, ends an answer first."""

    def order(self, query: RoutingQuery, replicas: RoutingCandidates) -> Sequence[int]:
        strain, draw = replicas.strain, self.rng.random
        rows = (strain.argsort() if len(strain) <= 64 else strain.argpartition(RANKS))[:RANKS]
        pairs = zip(strain[rows].tolist(), rows.tolist(), strict=True)
        best = [pair for pair in pairs if pair[0] <= replicas.max_strain]
        # Sorted as tuples, without a key: a routing decision is made for every request.
        if replicas.slo is not None:
            order: list[tuple[float, ...]] = [(value * (1 + _NEAR * draw()), row) for value, row in best]
        elif best:
            # Without objectives, replicas that are as good as the best are taken in turns.
            near, own = min(best)[0] * (1 + _NEAR), replicas.own_in_flight
            order = [(max(value, near), own.item(row), draw(), row) for value, row in best]
        else:
            order = []
        order.sort()
        return [int(each[-1]) for each in order]
