"""Metrics of one replica: those of its class, since each replica's name as a label would be another series."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from ...replicas.types import ReplicaProfile
from .fleet_counts import ReplicaCount
from .metric_records import service_records
from .metric_series import MetricSeries, series_of
from .metrics_ledger import MetricsLedger
from .metrics_publisher import MetricsPublisher
from .ray_exporter import RayMetricsExporter

REPLICA = "replica/"  # what the names of replicas begin with in the ledger


def replica_publisher(
    app: str, replica: str, pool: str, profile: ReplicaProfile, sources: Callable[[], Iterable[object]]
) -> MetricsPublisher:
    """Return a publisher of a replica's metrics, through Ray as well.

    app      name of the application
    replica  name of the replica
    sources  returns the objects whose fields are the metrics
    """
    labels, count = replica_labels(profile, pool), ReplicaCount()

    def series() -> Iterator[MetricSeries]:
        for source in (count, *sources()):
            yield from series_of(source, labels)

    ledger = MetricsLedger(service_records(), app, time.time)
    return MetricsPublisher(REPLICA + replica, series, ledger, RayMetricsExporter())


def replica_labels(profile: ReplicaProfile, pool: str) -> Mapping[str, str]:
    return {
        "model_name": profile.model.name,
        "pool": pool,
        "accelerator": profile.device_name,
        "compute_capability": profile.compute_capability or "none",
    }
