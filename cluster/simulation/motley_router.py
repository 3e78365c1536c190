"""Motley's router in a simulation: the prediction model and the policy of an ingress, told what that would see."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ...replicas.simulated.virtual_replica import SimulatedRequest
from ...replicas.types import BLOCK_TOKENS, ReplicaLoad
from ..routing.policy.predicted_latency import PredictedLatency
from ..routing.policy.routing_policy import RoutingPolicy, order_replicas
from ..routing.prediction.latency_model import LatencyModel
from ..routing.prediction.replica_speeds import profile_speed
from ..routing.prediction.routing_query import LatencyPrediction, RoutingQuery, Slo
from ..routing.prefix_index.prefix_hash_chain import BEGINNING_BLOCKS
from ..routing.prefix_index.prefix_index import PrefixIndex
from ..routing.prefix_index.stored_prefix_index import MAX_STORED_PIECES
from .simulated_fleet import SimulatedReplica

__all__ = ["MotleyRouter"]


class MotleyRouter:
    """Motley's router for the simulation.

    policy    orders the replicas; None: Motley's own
    sheds     whether it refuses a request that no replica is predicted to serve within the objectives
    prefixes  whether it considers which replicas have a prompt's prefix cached
    fetch_s   seconds per token from a store that all replicas share, which it then considers too; None: there is none
    """

    def __init__(
        self,
        fleet: Sequence[SimulatedReplica],
        slo: Slo,
        seed: int,
        *,
        policy: RoutingPolicy | None = None,
        sheds: bool = True,
        prefixes: bool = True,
        fetch_s: float | None = None,
    ) -> None:
        profiles = [each.profile(str(number)) for number, each in enumerate(fleet)]
        self.directory = LatencyModel(list(map(profile_speed, profiles)), slo, profiles)
        self._policy, self._sheds = policy or PredictedLatency(random.Random(f"motley {seed}")), sheds
        self._prefixes = PrefixIndex([each.published.num_blocks for each in fleet]) if prefixes else None
        self._stored = PrefixIndex([MAX_STORED_PIECES], MAX_STORED_PIECES)
        for number in range(len(fleet)) if fetch_s else ():
            self.directory.reads(number, 0, fetch_s or 0.0)
        self._sent: dict[int, tuple[RoutingQuery, LatencyPrediction]] = {}  # by id of the job

    def ranked(self, now: float, job: SimulatedRequest) -> Sequence[int]:
        cached = self._prefixes.depths(job.hashes) if self._prefixes else {}
        in_tokens = {replica: depth * BLOCK_TOKENS for replica, depth in cached.items()}
        stored = {store: depth * BLOCK_TOKENS for store, depth in self._stored.depths(job.hashes).items()}
        first = job.hashes[:BEGINNING_BLOCKS]
        self._query = RoutingQuery(job.prompt_tokens, in_tokens, stored, beginning=lambda: first[-1] if first else b"")
        self.replicas = self.directory.candidates(now, self._query, allow_late=not self._sheds)
        return order_replicas(self._policy, self._query, self.replicas)

    def sent(self, now: float, job: SimulatedRequest, replica: int) -> None:
        self._sent[id(job)] = self._query, self.replicas.predictions([replica])[0]
        self.directory.sent(now, replica, self.directory.computes(replica, self._query))
        self._policy.sent(self._query, replica)
        if self._prefixes is not None:
            self._prefixes.add(replica, job.hashes)

    def first(self, now: float, job: SimulatedRequest, replica: int) -> None:
        self._stored.add(0, job.hashes[: job.stored_tokens // BLOCK_TOKENS])
        self.directory.observe_ttft(replica, self._sent[id(job)][1], now - job.sent_s)

    def done(self, now: float, job: SimulatedRequest, replica: int) -> None:
        query, predicted = self._sent.pop(id(job))
        assert job.first_s is not None
        if job.output_tokens > 1:
            observed = (now - job.first_s) / (job.output_tokens - 1)
            self.directory.observe_tpot(replica, predicted, observed, job.output_tokens)
        self._policy.ended(query, replica)
        self.directory.done(now, replica)

    def set_usable(self, replica: int, *, usable: bool) -> None:
        """Set whether a replica may be chosen; one that becomes usable is new and has an empty cache."""
        self.directory.set_usable(replica, usable=usable)
        if usable and self._prefixes is not None:
            self._prefixes.clear(replica)

    def heard(self, now: float, replica: int, load: ReplicaLoad, of: float) -> None:
        self.directory.heard(replica, load, of)
