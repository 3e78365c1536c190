"""Metrics of the whole service, as one ingress tells them: its own, and what all other processes have recorded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable

from ..routing.ingress_stats import IngressStats
from ..transport.call_errors import CALL_ERRORS
from .metric_records import service_records
from .metric_series import MetricSeries, series_of
from .metrics_ledger import MetricsLedger
from .metrics_publisher import ALIVE_S, MetricsExporter, MetricsPublisher
from .replica_metrics import REPLICA

INGRESS = "ingress/"  # what the names of ingresses begin with in the ledger


class ServiceMetrics:
    """Metrics of a service, at one of its ingresses.

    app       name of the application
    ingress   name of this ingress
    model     name of the model
    stats     counters of its requests
    held      returns how many requests wait in it
    replicas  returns the names of the replicas that it knows
    exporter  through which its own are exported besides; None: they are not
    """

    def __init__(
        self,
        app: str,
        ingress: str,
        model: str,
        stats: IngressStats,
        *,
        held: Callable[[], int],
        replicas: Callable[[], Collection[str]],
        exporter: MetricsExporter | None = None,
    ) -> None:
        self._labels = {"model_name": model}
        self._stats, self._held, self._replicas = stats, held, replicas
        self._ledger = MetricsLedger(service_records(), app, time.time)
        self.publisher = MetricsPublisher(INGRESS + ingress, self._series, self._ledger, exporter)

    async def totals(self) -> tuple[MetricSeries, ...]:
        """Return the sums over all processes. Raises RuntimeError or OSError if the cluster does not tell them.

        What this ingress has counted is recorded first: what a scraper was told once does not fall if it ends.
        """
        await self.publisher.publish()
        return await asyncio.to_thread(self._ledger.totals, self._lives)

    def _series(self) -> Iterable[MetricSeries]:
        stats = self._stats
        stats.counters.held = self._held()
        yield from series_of(stats.counters, self._labels)
        yield from series_of(CALL_ERRORS, self._labels)
        if stats.slo is not None:
            yield from series_of(stats.slo, self._labels)
        for pool, counters in stats.pools.items():
            yield from series_of(counters, {**self._labels, "pool": pool})

    def _lives(self, source: str, age_s: float) -> bool:
        if source.startswith(REPLICA):
            return source.removeprefix(REPLICA) in self._replicas()
        return age_s <= 3 * ALIVE_S
