"""Routing policy that sends prompts with the same beginning to the same replica, unless that is overloaded."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from ....replicas.types import ReplicaProfile
from ..prediction.routing_candidates import RoutingCandidates
from ..prediction.routing_query import FloatArray, RoutingQuery
from .random_choice import MAX_DRAWN
from .routing_policy import RoutingPolicy

__all__ = ["PrefixAffinity"]

_PROMPT, _OUTPUT = 500.0, 150.0  # tokens of a request, for the speeds of replicas
_BOUND = 1.25  # bound of a replica's load, as a multiple of its fair share of all requests in flight
_POINTS = 64  # points on the ring of a mean replica


class PrefixAffinity(RoutingPolicy):
    """Replica that the prompt's beginning hashes to, or where that is overloaded the next one on the ring.

    This is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018), as routers for language
    models use it. Shares of the ring and bounds of the load are in proportion to speed. All ingresses have the same
    ring, since its points are hashes of the replicas' names.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._profiles: Sequence[ReplicaProfile | None] = ()  # the replicas on the ring
        self._ring: list[tuple[int, int]] = []  # points and rows

    def order(self, query: RoutingQuery, replicas: RoutingCandidates) -> list[int]:
        rows, in_flight = replicas.rows, replicas.in_flight
        speeds = 1 / (_PROMPT / replicas.prefill_tokens_per_s + _OUTPUT * replicas.token_s)
        if replicas.profiles is not self._profiles:
            self._profiles, self._ring = replicas.profiles, _ring(replicas.profiles, speeds)
        capacity = np.maximum(1.0, _BOUND * speeds / speeds[rows].sum() * (1 + in_flight[rows].sum()))
        onwards = self._onwards(_position(query.beginning() or self.rng.randbytes(8)), set(rows.tolist()))
        return sorted(onwards, key=lambda row: bool(in_flight[row] >= capacity[row]))

    def _onwards(self, position: int, usable: set[int]) -> list[int]:
        """Return the first usable rows along the ring from a position on."""
        start, found = bisect(self._ring, (position, -1)), dict[int, None]()
        for at in range(start, start + len(self._ring)):
            row = self._ring[at % len(self._ring)][1]
            if row in usable:
                found[row] = None
                if len(found) == min(len(usable), MAX_DRAWN):
                    break
        return list(found)


def _ring(profiles: Sequence[ReplicaProfile | None], speeds: FloatArray) -> list[tuple[int, int]]:
    """Return the sorted points of all replicas, each with its row."""
    names = {row: profile.replica_id.encode() for row, profile in enumerate(profiles) if profile is not None}
    counts = np.maximum(1, np.rint(speeds / speeds[list(names)].mean() * _POINTS)).astype(int)
    return sorted(
        (_position(b"%s %d" % (name, number)), row) for row, name in names.items() for number in range(counts[row])
    )


def _position(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest())
