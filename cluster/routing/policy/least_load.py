"""Routing policies that choose the replica with the least to do: by requests, or by work for its speed."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from ..prediction.routing_candidates import RoutingCandidates
from ..prediction.routing_query import FloatArray, RoutingQuery
from .routing_policy import RoutingPolicy

__all__ = ["LeastRequests", "WeightedLeastWork"]


class LeastRequests(RoutingPolicy):
    """Replica with the fewest requests in flight, at random among equals."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._chance = np.random.default_rng(rng.getrandbits(64))

    def order(self, query: RoutingQuery, replicas: RoutingCandidates) -> list[int]:
        return _ascending_rows(replicas, replicas.in_flight + self._chance.random(len(replicas.strain)))


class WeightedLeastWork(RoutingPolicy):
    """Replica with the least work in flight for its speed: tokens of prompts, and of answers of mean length.

    Requests of other ingresses count as usual ones.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._mean_prompt = 500.0
        self._prompts: Counter[int] = Counter()  # prompt tokens in flight, by row

    def order(self, query: RoutingQuery, replicas: RoutingCandidates) -> list[int]:
        tokens, own = np.zeros(len(replicas.strain)), replicas.own_in_flight
        tokens[list(self._prompts)] = list(self._prompts.values())
        tokens += (replicas.in_flight - own) * self._mean_prompt + query.prompt_tokens
        output_tokens = (replicas.in_flight + query.sequences) * replicas.output_tokens
        return _ascending_rows(replicas, tokens / replicas.prefill_tokens_per_s + output_tokens * replicas.token_s)

    def sent(self, query: RoutingQuery, replica: int) -> None:
        self._prompts[replica] += query.prompt_tokens
        self._mean_prompt += (query.prompt_tokens / query.sequences - self._mean_prompt) / 200

    def ended(self, query: RoutingQuery, replica: int) -> None:
        self._prompts[replica] -= query.prompt_tokens


def _ascending_rows(replicas: RoutingCandidates, key: FloatArray) -> list[int]:
    rows = replicas.rows
    order: list[int] = rows[key[rows].argsort(kind="stable")].tolist()
    return order
