"""Deployment class of a pool in Serve: a replica, its metrics, and the warm processes on its node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray import serve

from ....replicas.replica import Replica
from ...metrics.replica_metrics import replica_publisher
from ..warm_workers.warm_worker_keeper import keep_warm_workers
from .ray_log_page import log_to_ray_page


class PoolReplica(Replica):
    """A replica that publishes its metrics.

    spares  number of warm processes that wait on its node once it is ready
    """

    # Serve awaits it, of which type checkers know nothing.
    async def __init__(self, make_worker: Callable[[], Any], spares: int = 0) -> None:  # type: ignore[misc]
        log_to_ray_page()
        await super().__init__(make_worker)
        context = serve.get_replica_context()
        publisher = replica_publisher(
            context.app_name,
            context.replica_id.unique_id,
            context.deployment,
            self._worker.profile(),
            self._worker.metric_sources,
        )
        self._metrics_task = asyncio.create_task(publisher.run())
        if spares:
            keep_warm_workers(spares)
