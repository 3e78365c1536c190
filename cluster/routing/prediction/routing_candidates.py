"""Columns of what an ingress knows of its replicas when it places a request: all that a routing policy sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....replicas.types import ReplicaProfile
from .routing_query import FloatArray, LatencyPrediction, Slo

__all__ = ["LAST", "OTHERS", "RoutingCandidates"]

OTHERS, LAST = 1e6, 1e9  # strain that is added to replicas which come after all others


class RoutingCandidates(NamedTuple):
    """All replicas of an ingress at the moment when one request is placed.

    Each array has an entry for every row of the ingress's `LatencyModel`, and is only to be read. `rows` lists those
    that may be chosen.

    ttft_s, tpot_s        predicted time to first token, and time per token after it, in seconds
    strain                share of its objective that the scarcer of both times takes, or without objectives the seconds
                          until an answer of usual length ends; from `OTHERS` on for replicas that come after others,
                          infinite for those that may not be chosen
    max_strain            finite strain up to which a replica may be chosen
    slo                   latency objectives, if there are any
    parts                 `computed`, `queue_s` and, where anything is fetched, `fetch_s` of `LatencyPrediction`
    ttft_off, tpot_off    corrections that are part of the predictions
    growth                factor of the time per token, which is part of the predictions too
    reported              sequences on each replica by its latest load, whichever ingress sent them
    sent                  sequences that this ingress has sent since that load, less those that have ended
    own_in_flight         sequences of this ingress on each replica
    queued_tokens         prompt tokens that wait there by the latest load
    prefill_tokens_per_s  prompt tokens that each replica computes in a second
    token_s               seconds of its time that a token of an answer takes, in a batch of usual size
    output_tokens         mean tokens of recent answers
    profiles              profile of each replica: its name, pool, device and compute capability; None: no replica
    """

    ttft_s: FloatArray
    tpot_s: FloatArray
    strain: FloatArray
    max_strain: float
    slo: Slo | None
    parts: tuple[FloatArray, ...]
    ttft_off: FloatArray
    tpot_off: FloatArray
    growth: float
    reported: FloatArray
    sent: FloatArray
    own_in_flight: FloatArray
    queued_tokens: FloatArray
    prefill_tokens_per_s: FloatArray
    token_s: FloatArray
    output_tokens: float
    profiles: Sequence[ReplicaProfile | None]

    @property
    def rows(self) -> NDArray[np.intp]:
        """Rows of the replicas that may be chosen."""
        return np.flatnonzero(self.strain <= self.max_strain)

    @property
    def in_flight(self) -> FloatArray:
        """Sequences on each replica of this ingress and, as far as its latest load tells, of the others."""
        in_flight: FloatArray = np.maximum(self.reported + self.sent, self.own_in_flight)
        return in_flight

    def predictions(self, rows: Sequence[int]) -> list[LatencyPrediction]:
        """Return the predictions of these rows, in the same order."""
        ttft_s, tpot_s, strain, ttft_off = self.ttft_s.item, self.tpot_s.item, self.strain.item, self.ttft_off.item
        tpot_off, growth, (computed, queue_s) = self.tpot_off.item, self.growth, [part.item for part in self.parts[:2]]
        fetch_s = self.parts[2].item if len(self.parts) > 2 else None
        create = tuple.__new__  # faster than the class itself, and this is done for every request
        return [
            create(LatencyPrediction, (
                row, ttft_s(row), tpot_s(row), strain(row), ttft_off(row), tpot_off(row) * growth, computed(row),
                queue_s(row), 0.0 if fetch_s is None else fetch_s(row),
            ))
            for row in rows
        ]  # fmt: skip
