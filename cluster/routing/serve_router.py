"""Serve's request router, which runs in the ingress process and chooses a replica for every call to its pool."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ...replicas.types import CallId
from ..ray_compat.serve_handles import (
    cached_queue_len,
    forget_queue_len,
    pause_before_next_choice,
    router_deployment,
)
from .attempt.call_attempt import CallAttempt, find_attempt
from .attempt.placement import Placement, ReplicaCandidate, SuspectReplicas
from .directory.replica_registry import PublishedReplica, process_registry


class PoolRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Request router that offers Serve one replica at a time, in the order of the call's `Placement`.

    Offering one at a time tells which replica a request went to before that replica has answered. Requests are not
    placed first come, first served: a replica that is right for one request need not be right for the next. What the
    router learns about replicas goes to the process's `ReplicaRegistry`.
    """

    _running: _RunningReplicas | None = None  # as of the last update

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._running = _RunningReplicas(replicas)
        published = {
            name: PublishedReplica(one.replica_metadata, one.routing_stats)
            for name, one in self._running.replicas.items()
        }
        process_registry().update(router_deployment(self), published)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if self._running is not None:
            self._running.drop(replica_id.unique_id)
        process_registry().gone(router_deployment(self), replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        attempt = _attempt(pending_request)
        current = self._running or _RunningReplicas(candidate_replicas)
        chosen, wait = attempt.choose_best(current.candidates), False
        if chosen is None:
            chosen, wait = attempt.choose(map(self._queued, current.candidates.values(), current.replicas.values()))
        if pending_request is not None:
            pause_before_next_choice(pending_request, wait)
        if chosen is None:
            return []
        replica = current.replicas[chosen.id]
        if chosen.id in attempt.suspects:
            forget_queue_len(self, replica)  # so Serve queries it before it sends
        return [[replica]]

    def _queued(self, candidate: ReplicaCandidate, replica: RunningReplica) -> ReplicaCandidate:
        queue_len = cached_queue_len(self, replica)
        return ReplicaCandidate(candidate.id, candidate.numerics, queue_len, candidate.weights)


class _RunningReplicas:
    """Index by name of the replicas that exist, built once because every call looks at it."""

    def __init__(self, replicas: list[RunningReplica]) -> None:
        self.replicas = {one.replica_id.unique_id: one for one in replicas}
        self.candidates = {name: _candidate(name, one) for name, one in self.replicas.items()}

    def drop(self, name: str) -> None:
        self.replicas.pop(name, None)
        self.candidates.pop(name, None)


def _candidate(name: str, replica: RunningReplica) -> ReplicaCandidate:
    weights = replica.routing_stats.get("load", {}).get("weights_contents", "")
    return ReplicaCandidate(name, str(replica.replica_metadata.get("numerics", "")), weights=str(weights))


def _attempt(pending: PendingRequest | None) -> CallAttempt:
    """Return the attempt of a call, whose identity is the last argument."""
    found = find_attempt(pending.args[-1]) if pending is not None and pending.args else None
    return found or CallAttempt(CallId("", 0), Placement(), SuspectReplicas())
