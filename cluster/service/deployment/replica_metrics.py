"""Metrics of a replica for Prometheus: Ray's agents export them, by names that begin with ray_motley_.

Names are vLLM's. What the replica does not have, such as a prefix store, has no metrics, rather than zeros without
meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve import metrics as through_ray

from ....replicas.kv.prefix.prefix_stats import PrefixStats
from ....replicas.kv.store.prefix_store import BreakerState
from ....replicas.types import ReplicaLoad, ReplicaProfile
from .histogram_metrics import HistogramExporter

_LABELS = ("model_name", "pool", "accelerator", "compute_capability")
_STATES = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}

GAUGES = {
    "num_requests_running": "Sequences that the replica computes now",
    "num_requests_waiting": "Sequences that have been admitted and wait for a place among the running ones",
    "kv_cache_usage_perc": "Share of the KV cache's blocks that are in use, from 0 to 1",
    "external_prefix_cache_breaker": "Prefix store: 0 used, 1 left alone after failures, 0.5 tried again with one call",
    "external_prefix_cache_queued": "Values that wait to be written to the prefix store",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of the requests whose answers have begun",
    "num_preemptions": "Times that a running sequence lost its place to another one",
    "spec_decode_num_draft_tokens": "Draft tokens that speculative decoding has tried",
    "spec_decode_num_accepted_tokens": "Draft tokens that the model has accepted",
    "prefix_cache_queries": "Prompt tokens that were looked up in the replica's own KV cache",
    "prefix_cache_hits": "Prompt tokens that were found in the replica's own KV cache",
    "external_prefix_cache_queries": "Prompt tokens that were looked up in the prefix store",
    "external_prefix_cache_hits": "Prompt tokens whose KV arrived from the prefix store in time",
    "external_prefix_cache_reads": "Calls that read from the prefix store",
    "external_prefix_cache_read_seconds": "Seconds that calls which read from the prefix store took, in total",
    "external_prefix_cache_read_bytes": "Bytes read from the prefix store",
    "external_prefix_cache_writes": "Calls that wrote to the prefix store",
    "external_prefix_cache_write_seconds": "Seconds that calls which wrote to the prefix store took, in total",
    "external_prefix_cache_written_bytes": "Bytes written to the prefix store",
    "external_prefix_cache_errors": "Prefix store calls that failed, and values that could not be used, by reason",
    "external_prefix_cache_dropped": "Values that were not written to the prefix store, by reason",
}
_REASONED = ("external_prefix_cache_errors", "external_prefix_cache_dropped")  # these are counted by reason
_NO_FLAW = ("hit", "miss", "timeout", "error")  # the store itself counts why it failed


class ReplicaMetricsExporter:
    """Exporter of one replica's metrics. `through`: has `Counter` and `Gauge` as ray.util.metrics does."""

    def __init__(self, profile: ReplicaProfile, pool: str, through: Any = through_ray) -> None:
        labels = profile.model.name, pool, profile.device_name, profile.compute_capability or "none"
        self._labels = dict(zip(_LABELS, labels, strict=True))
        self._through = through
        self._histograms = HistogramExporter(self._labels, through)
        self._made: dict[str, Any] = {}
        self._totals: dict[tuple[str, str], float] = {}

    def tell(self, load: ReplicaLoad, stats: PrefixStats | None) -> None:
        used = load.kv_blocks_total - load.kv_blocks_free
        self._set("num_requests_running", load.running)
        self._set("num_requests_waiting", load.waiting)
        if load.kv_blocks_total:
            self._set("kv_cache_usage_perc", used / load.kv_blocks_total)
        self._reach("prompt_tokens", load.prompt_tokens)
        self._reach("num_preemptions", load.preemptions_swapped + load.preemptions_recomputed)
        self._reach("spec_decode_num_draft_tokens", load.drafted_tokens)
        self._reach("spec_decode_num_accepted_tokens", load.accepted_tokens)
        self._reach("prefix_cache_queries", load.queried_tokens)
        self._reach("prefix_cache_hits", load.cached_tokens - load.external_hit_tokens)
        if stats is not None:
            self._tell_store(stats)

    def _tell_store(self, stats: PrefixStats) -> None:
        store, name = stats.store, "external_prefix_cache"
        self._set(f"{name}_breaker", _STATES[store.breaker])
        self._set(f"{name}_queued", store.queued)
        self._reach(f"{name}_queries", stats.queried_tokens)
        self._reach(f"{name}_hits", stats.hit_tokens)
        self._reach(f"{name}_reads", store.reads)
        self._reach(f"{name}_read_seconds", store.read_s)
        self._reach(f"{name}_read_bytes", store.bytes_read)
        self._reach(f"{name}_writes", store.writes)
        self._reach(f"{name}_write_seconds", store.write_s)
        self._reach(f"{name}_written_bytes", store.bytes_written)
        if stats.fetch_s is not None:
            self._histograms.tell(f"{name}_fetch_seconds", stats.fetch_s)
        flaws = {f"unfit_{why}": count for why, count in stats.outcomes.items() if why not in _NO_FLAW}
        self._reach_each(f"{name}_errors", {**store.errors, **flaws})
        self._reach_each(f"{name}_dropped", store.dropped)

    def _set(self, name: str, value: float) -> None:
        self._one(name, self._through.Gauge, GAUGES[name]).set(value, self._labels)

    def _reach_each(self, name: str, totals: Mapping[str, int]) -> None:
        for reason, total in totals.items():
            self._reach(name, total, reason)

    def _reach(self, name: str, total: float, reason: str = "") -> None:
        """Raise a counter to a total that its source counts since its own start, by adding the difference."""
        more = total - self._totals.get((name, reason), 0)
        if more > 0:
            self._totals[name, reason] = total
            labels = {**self._labels, "reason": reason} if reason else self._labels
            self._one(name, self._through.Counter, COUNTERS[name]).inc(more, labels)

    def _one(self, name: str, kind: Any, description: str) -> Any:
        if name not in self._made:
            keys = (*_LABELS, "reason") if name in _REASONED else _LABELS
            self._made[name] = kind(f"motley_{name}", description=description, tag_keys=keys)
        return self._made[name]
