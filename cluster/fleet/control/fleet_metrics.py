"""Metrics of the control plane: what each pool is to have, and how often that was decided."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ...metrics.fleet_counts import ScalingCounts
from ...metrics.metric_records import service_records
from ...metrics.metric_series import MetricSeries, series_of
from ...metrics.metrics_ledger import CONTROL, MetricsLedger
from ...metrics.metrics_publisher import MetricsPublisher
from ...metrics.ray_exporter import RayMetricsExporter
from .reconciler.fleet_reconciler import POLICY_ACTOR_PREFIX, FleetReconciler
from .state.control_state import FleetEvent


class FleetMetrics:
    """Series of a control plane's pools, whose decisions are counted from now on."""

    def __init__(self, plane: FleetReconciler) -> None:
        self._plane, self._counts = plane, dict[str, ScalingCounts]()
        self._counted = plane.state.sequence

    def series(self) -> Iterator[MetricSeries]:
        """Yield the series as they are now; to be called at least once in a few hundred events."""
        state, snapshots = self._plane.state, self._plane.snapshots
        for event in state.events:
            if event.sequence > self._counted and event.kind == "scaled":
                self._count(event)
        self._counted = state.sequence
        for name in self._counts.keys() | state.pools.keys():
            counts = self._of(name)
            counts.wanted = state.pools[name].target if name in state.pools else 0
            counts.starting = snapshots[name].starting if name in snapshots else 0
            counts.draining = sum(one.pool == name for one in state.drains.values())
            yield from series_of(counts, {"pool": name})

    def _count(self, event: FleetEvent) -> None:
        by_policy = event.by.startswith(POLICY_ACTOR_PREFIX)
        self._of(event.pool).decided(event.before, event.after, by_policy=by_policy)

    def _of(self, pool: str) -> ScalingCounts:
        return self._counts.setdefault(pool, ScalingCounts())


def fleet_publisher(app: str, plane: FleetReconciler, run: str) -> MetricsPublisher:
    """Return a publisher of a control plane's metrics, through Ray as well.

    run  name of this run of the control plane: its counters begin at 0, and those of the runs before stay as they are
    """
    ledger = MetricsLedger(service_records(), app, time.time)
    return MetricsPublisher(CONTROL + run, FleetMetrics(plane).series, ledger, RayMetricsExporter())
