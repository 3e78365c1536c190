"""Motley's own router in a simulation: the prediction model of the ingress, told what an ingress would see."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ...replicas.simulated.roofline_rates import roofline_rates
from ...replicas.simulated.virtual_replica import SimulatedRequest
from ...replicas.types import BLOCK_TOKENS, ReplicaLoad
from ..routing.prediction.latency_model import LatencyModel, LatencyPrediction, ReplicaSpeed, RoutingQuery, Slo
from ..routing.prefix_index.prefix_index import PrefixIndex
from ..routing.prefix_index.stored_prefix_index import MAX_STORED_PIECES
from .simulated_fleet import SimulatedReplica

__all__ = ["MotleyRouter", "profiled_speed"]


def profiled_speed(replica: SimulatedReplica) -> ReplicaSpeed:
    """Return a replica's speed according to its profile, not its true speed."""
    rates = roofline_rates(replica.known, replica.max_batch_tokens)
    return ReplicaSpeed(
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_s=rates.decode_s,
        context_s=rates.context_s,
        chunk=replica.max_batch_tokens,
        max_running=replica.max_running,
        kv_tokens=replica.known.num_blocks * BLOCK_TOKENS,
    )


class MotleyRouter:
    """Motley's router for the simulation.

    prefixes  whether it considers which replicas have a prompt's prefix cached
    fetch_s   seconds per token from a store that all replicas share, which it then considers too; None: there is none
    """

    def __init__(
        self,
        fleet: Sequence[SimulatedReplica],
        slo: Slo,
        seed: int,
        *,
        prefixes: bool = True,
        fetch_s: float | None = None,
    ) -> None:
        self._directory = LatencyModel([profiled_speed(each) for each in fleet], slo, random.Random(f"motley {seed}"))
        self._prefixes = PrefixIndex([each.known.num_blocks for each in fleet]) if prefixes else None
        self._stored = PrefixIndex([MAX_STORED_PIECES], MAX_STORED_PIECES)
        for number in range(len(fleet)) if fetch_s else ():
            self._directory.reads(number, 0, fetch_s or 0.0)
        self._ranked: dict[int, LatencyPrediction] = {}  # predictions for the job that is being placed, by replica
        self._predicted: dict[int, LatencyPrediction] = {}  # predictions by id of the job

    def ranked(self, now: float, job: SimulatedRequest) -> list[int]:
        cached = self._prefixes.depths(job.hashes) if self._prefixes else {}
        in_tokens = {replica: depth * BLOCK_TOKENS for replica, depth in cached.items()}
        stored = {store: depth * BLOCK_TOKENS for store, depth in self._stored.depths(job.hashes).items()}
        self._ask = RoutingQuery(job.prompt_tokens, in_tokens, stored)
        ranked = self._directory.ranked(now, self._ask)
        self._ranked = {each.replica: each for each in ranked}
        return [each.replica for each in ranked]

    def sent(self, now: float, job: SimulatedRequest, replica: int) -> None:
        self._predicted[id(job)] = self._ranked[replica]
        self._directory.sent(now, replica, self._directory.computes(replica, self._ask))
        if self._prefixes is not None:
            self._prefixes.add(replica, job.hashes)

    def first(self, now: float, job: SimulatedRequest, replica: int) -> None:
        self._stored.add(0, job.hashes[: job.stored_tokens // BLOCK_TOKENS])
        self._directory.observe_ttft(replica, self._predicted[id(job)], now - job.sent_s)

    def done(self, now: float, job: SimulatedRequest, replica: int) -> None:
        predicted = self._predicted.pop(id(job))
        assert job.first_s is not None
        if job.output_tokens > 1:
            observed = (now - job.first_s) / (job.output_tokens - 1)
            self._directory.observe_tpot(replica, predicted, observed, job.output_tokens)
        self._directory.done(now, replica)

    def set_usable(self, replica: int, *, usable: bool) -> None:
        """Set whether a replica may be chosen; one that becomes usable is new and has an empty cache."""
        self._directory.set_usable(replica, usable=usable)
        if usable and self._prefixes is not None:
            self._prefixes.clear(replica)

    def heard(self, now: float, replica: int, load: ReplicaLoad, of: float) -> None:
        self._directory.heard(replica, load, of)
