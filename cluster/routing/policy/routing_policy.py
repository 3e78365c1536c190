"""Base of routing policies, and the order that follows from one. Pure: no Ray, no clock."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..prediction.routing_candidates import LAST, OTHERS, RoutingCandidates
from ..prediction.routing_query import RoutingQuery

__all__ = ["RANKS", "RoutingPolicy", "order_replicas"]

RANKS = 8  # replicas that are tried for one request


class RoutingPolicy:
    """Policy that orders the replicas for each request, with a state of its own for one ingress.

    rng  source of randomness
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def order(self, query: RoutingQuery, replicas: RoutingCandidates) -> Sequence[int]:
        """Return rows of the replicas in the order in which to try them; only those of `replicas.rows` may be in it.

        A request that has to wait is ordered more than once: what is counted is counted in `sent`.
        """
        raise NotImplementedError

    def sent(self, query: RoutingQuery, replica: int) -> None:
        """Take note that a request goes to a replica now."""

    def ended(self, query: RoutingQuery, replica: int) -> None:
        """Take note that a request which was sent to a replica has ended there, or did not get there."""


def order_replicas(policy: RoutingPolicy, query: RoutingQuery, replicas: RoutingCandidates) -> Sequence[int]:
    """Return the rows of replicas in a policy's order, but behind all others those that the query puts there.

    These are replicas that the request has failed on, and those that cannot go on as the answer began.
    """
    rows = policy.order(query, replicas)
    if query.last or query.others or query.numerics is not None:
        rows = sorted(rows, key=lambda row: _group(float(replicas.strain[row])))
    return rows


def _group(strain: float) -> tuple[float, float]:
    last = strain // LAST
    return last, 0.0 if last else strain // OTHERS
