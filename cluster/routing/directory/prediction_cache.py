"""Cached prediction for one request at one moment, from which all questions of that moment are answered."""

from __future__ import annotations

from dataclasses import dataclass

from ....replicas.types import Request
from ..prediction.routing_query import LatencyPrediction, RoutingQuery
from ..prefix_index.prefix_hash_chain import PrefixHashChain

__all__ = ["PredictionCache"]

SAME_S = 0.001  # lifetime of the cache: reported changes discard it sooner


@dataclass(slots=True)
class PredictionCache:
    """Prediction for one request at one moment.

    at      time of the prediction, in seconds of the directory's clock
    chain   hash chain of the request's prompt
    query   the routing query for the request
    ranked  the replicas in the policy's order, including those that would miss the objectives; None: not ranked yet
    """

    request: Request
    at: float
    chain: PrefixHashChain
    query: RoutingQuery
    ranked: list[LatencyPrediction] | None = None

    def is_of(self, request: Request, now: float) -> bool:
        """Return whether it is fresh and for this request, which may have been rebuilt with less time left."""
        own = self.request
        return now - self.at < SAME_S and (
            own is request
            or (
                own.prompt_ids is request.prompt_ids
                and own.sampling is request.sampling
                and own.request_id == request.request_id
                and own.cache_salt == request.cache_salt
                and own.pooling == request.pooling
                and own.output_ids == request.output_ids
            )
        )
