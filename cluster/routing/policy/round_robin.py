"""Routing policy that takes replicas in turn."""

from __future__ import annotations

import numpy as np

from ..prediction.routing_candidates import RoutingCandidates
from ..prediction.routing_query import RoutingQuery
from .routing_policy import RoutingPolicy

__all__ = ["RoundRobin"]


class RoundRobin(RoutingPolicy):
    """Replica after the one that the request before went to."""

    _latest = -1

    def order(self, query: RoutingQuery, replicas: RoutingCandidates) -> list[int]:
        rows = replicas.rows
        order: list[int] = np.roll(rows, -int(rows.searchsorted(self._latest, side="right"))).tolist()
        return order

    def sent(self, query: RoutingQuery, replica: int) -> None:
        self._latest = replica
