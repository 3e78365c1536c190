"""Table of all metrics of a service, made of the metadata of the fields that carry them."""

from __future__ import annotations

from ...replicas.engine.drafting.draft_counts import DraftCounts
from ...replicas.engine.engine_timings import EngineTimings
from ...replicas.host.metric_fields import Metric, metrics_of
from ...replicas.kv.prefix.prefix_stats import PrefixStats
from ...replicas.kv.store.prefix_store import StoreStats
from ...replicas.types import ReplicaLoad
from ..routing.ingress_counters import IngressCounters, PoolCounters
from ..routing.prediction.routing_query import Slo
from ..transport.call_errors import CallErrors
from .fleet_counts import ReplicaCount, ScalingCounts

# Of an ingress, its objectives, its requests to each pool and its process; of a replica; of the control plane.
_CARRIERS = (
    IngressCounters, Slo, PoolCounters, CallErrors, ReplicaCount, ReplicaLoad, EngineTimings, DraftCounts, PrefixStats,
    StoreStats, ScalingCounts,
)  # fmt: skip
METRICS: dict[str, Metric] = {metric.name: metric for kind in _CARRIERS for metric in metrics_of(kind).values()}
assert len(METRICS) == sum(len(metrics_of(kind)) for kind in _CARRIERS), "each name is of one field"
