"""Table of all metrics that a service exports to Prometheus, made of the metadata of the fields that carry them."""

from __future__ import annotations

from ....replicas.host.metric_fields import Metric, metrics_of
from ....replicas.kv.prefix.prefix_stats import PrefixStats
from ....replicas.kv.store.prefix_store import StoreStats
from ....replicas.types import ReplicaLoad
from ...routing.ingress_stats import PoolLatencies

_CARRIERS = (PoolLatencies, ReplicaLoad, PrefixStats, StoreStats)  # of an ingress; the others of a replica
METRICS: dict[str, Metric] = {metric.name: metric for kind in _CARRIERS for metric in metrics_of(kind).values()}
assert len(METRICS) == sum(len(metrics_of(kind)) for kind in _CARRIERS), "each name is of one field"
