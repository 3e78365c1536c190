"""Publication of a process's metrics once a second, as long as it lives: through Ray, and in the service's ledger."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from .metric_series import MetricSeries
from .metrics_ledger import MetricsLedger

log = logging.getLogger(__name__)

PERIOD_S = 1.0
ALIVE_S = 5.0  # a record is written so often though nothing has changed: it tells that the process lives


class MetricsExporter(Protocol):
    def export(self, series: Iterable[MetricSeries]) -> None: ...


class MetricsPublisher:
    """Publisher of one process's series.

    source    name of the process
    collect   returns its series
    ledger    where they are recorded
    exporter  through which they are exported besides; None: they are not
    """

    def __init__(
        self,
        source: str,
        collect: Callable[[], Iterable[MetricSeries]],
        ledger: MetricsLedger,
        exporter: MetricsExporter | None = None,
    ) -> None:
        self._source, self._collect, self._ledger, self._exporter = source, collect, ledger, exporter
        self._written: Sequence[MetricSeries] = ()
        self._written_s = -ALIVE_S
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._last = 0  # number of the latest series that were written

    async def publish(self, *, alive_s: float = ALIVE_S) -> None:
        """Publish the series as they are now, unless they are as they were less than `alive_s` seconds ago."""
        series = tuple(self._collect())
        now = time.monotonic()
        if series != self._written or now - self._written_s >= alive_s:
            await asyncio.to_thread(self._publish, next(self._numbers), series)
            self._written, self._written_s = series, now

    def _publish(self, number: int, series: Sequence[MetricSeries]) -> None:
        """Write series unless later ones have been: a scrape publishes too, and must not be overtaken by older ones."""
        with self._lock:
            if number < self._last:
                return
            self._ledger.write(self._source, series)
            self._last = number
            if self._exporter is not None:
                self._exporter.export(series)

    async def run(self) -> None:
        """Publish once a second, for as long as the process lives.

        An error is logged when it first occurs, and the next second is tried all the same: no request fails for it.
        """
        failing = False
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.publish()
                failing = False
            except Exception:
                if not failing:
                    log.exception("The metrics cannot be published; they stay as they are until this succeeds")
                failing = True
