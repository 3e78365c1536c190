"""Deployment class of a pool in Serve: a replica, its metrics, and the warm processes on its node."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ray import serve

from ....replicas.replica import Replica
from ..warm_workers.warm_worker_keeper import keep_warm_workers
from .replica_metrics import ReplicaMetricsExporter

PERIOD_S = 1.0


class PoolReplica(Replica):
    """A replica that exports its metrics when Serve asks for its load, at most once every PERIOD_S.

    spares  number of warm processes that wait on its node once it is ready
    """

    # Serve awaits it, of which type checkers know nothing.
    async def __init__(self, make_worker: Callable[[], Any], spares: int = 0) -> None:  # type: ignore[misc]
        await super().__init__(make_worker)
        self._exporter = ReplicaMetricsExporter(self._worker.profile(), serve.get_replica_context().deployment)
        self._exported_s = 0.0
        if spares:
            keep_warm_workers(spares)

    def record_routing_stats(self) -> dict[str, Any]:
        now = time.monotonic()
        if now - self._exported_s >= PERIOD_S:
            self._exported_s = now
            self._exporter.export(self._worker.load(), self._worker.prefix_stats())
        return super().record_routing_stats()
