"""Serve's side of the choice of a replica: it runs in the ingress process, for every call to the pool."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .placement import Candidate, Placement, Suspects


class PoolRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Offers Serve one replica at a time, in the order of the request's `Placement`.

    One at a time, so that it is known which replica a request went to before that has answered. No FIFO: a
    replica that is right for one request need not be for the next in line.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        placement = _placement(pending_request)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        chosen, wait = placement.choose(self._candidate(name, replica) for name, replica in by_id.items())
        if pending_request is not None:
            pending_request.routing_context.should_backoff = wait
        if chosen is None:
            return []
        replica = by_id[chosen.id]
        if chosen.id in placement.suspects:
            self.replica_queue_len_cache.invalidate_key(replica.replica_id)  # so Serve asks it before it sends
        return [[replica]]

    def _candidate(self, name: str, replica: RunningReplica) -> Candidate:
        queue_len = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return Candidate(name, str(replica.replica_metadata.get("numerics", "")), queue_len)


def _placement(pending: PendingRequest | None) -> Placement:
    if pending is not None and pending.args and isinstance(pending.args[-1], Placement):
        return pending.args[-1]
    return Placement(Suspects())
