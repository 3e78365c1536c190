"""Values exported to Prometheus: growth of what only grows, and nothing of what is not there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from motley.cluster.service.deployment.metrics_table import METRICS
from motley.cluster.service.deployment.replica_metrics import ReplicaMetricsExporter
from motley.replicas.kv.histogram import HistogramSnapshot
from motley.replicas.kv.prefix.prefix_stats import PrefixStats
from motley.replicas.kv.store.prefix_store import BreakerState, StoreStats
from motley.replicas.types import ModelInfo, ReplicaLoad, ReplicaProfile

PROFILE = ReplicaProfile(
    "r", ModelInfo("qwen", "qwen2", 100, 512, (1,), "float16", "none"), "cuda:0", "Tesla P40", "6.1", "fast", "f",
    1.0, 1.0, 100, 512,
)  # fmt: skip
LABELS = {"model_name": "qwen", "pool": "p40", "accelerator": "Tesla P40", "compute_capability": "6.1"}


class Seen(dict[tuple[str, str], float]):
    """By name and reason."""

    def kind(self, name: str, description: str, tag_keys: tuple[str, ...]) -> Any:
        assert description

        def put(value: float, labels: dict[str, str], *, add: bool) -> None:
            assert set(labels) == set(tag_keys)
            assert labels.items() >= LABELS.items()
            assert value > 0 or not add, "Ray refuses an increment of nothing"
            at = name.removeprefix("motley_"), labels.get("reason", "") or labels.get("le", "")
            self[at] = value + (self.get(at, 0) if add else 0)

        return SimpleNamespace(
            set=lambda value, labels: put(value, labels, add=False),
            inc=lambda value, labels: put(value, labels, add=True),
        )


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def exporter(seen: Seen) -> ReplicaMetricsExporter:
    return ReplicaMetricsExporter(PROFILE, "p40", SimpleNamespace(Counter=seen.kind, Gauge=seen.kind))


LOAD = ReplicaLoad(
    running=3, waiting=2, kv_blocks_free=25, kv_blocks_total=100,
    prompt_tokens=1000, queried_tokens=900, cached_tokens=600,
    external_queried_tokens=512, external_hit_tokens=256, preemptions_swapped=1, preemptions_recomputed=2,
)  # fmt: skip
STORE = StoreStats(
    reads=4, read_s=0.5, bytes_read=1000, writes=2, write_s=0.25, bytes_written=500, queued=7,
    errors={"timeout": 2}, dropped={"quota": 1}, breaker=BreakerState.OPEN,
)  # fmt: skip


def test_totals_are_what_was_counted_however_often_they_are_told(exporter: ReplicaMetricsExporter, seen: Seen) -> None:
    fetched = HistogramSnapshot((0.01,), (3, 1), 0.25)
    stats = PrefixStats(512, 256, {"hit": 3, "miss": 1, "seal": 2}, 5, 1e9, 128, 1000, STORE, fetch_s=fetched)
    for _ in range(2):
        exporter.export(LOAD, stats)
    later = replace(STORE, reads=6, errors={"timeout": 5, "protocol": 1}, breaker=BreakerState.CLOSED, queued=0)
    exporter.export(
        replace(LOAD, running=0, prompt_tokens=1100, queried_tokens=950), replace(stats, hit_tokens=300, store=later)
    )
    expected = {
        "num_requests_running": 0, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.75, "prompt_tokens": 1100,
        "num_preemptions": 3, "prefix_cache_queries": 950, "prefix_cache_hits": 344,
        "external_prefix_cache_queries": 512, "external_prefix_cache_hits": 300, "external_prefix_cache_reads": 6,
        "external_prefix_cache_read_seconds": 0.5, "external_prefix_cache_read_bytes": 1000,
        "external_prefix_cache_writes": 2, "external_prefix_cache_write_seconds": 0.25,
        "external_prefix_cache_written_bytes": 500, "external_prefix_cache_breaker": 0,
        "external_prefix_cache_queued": 0, "external_prefix_cache_fetch_seconds_sum": 0.25,
        "external_prefix_cache_fetch_seconds_count": 4,
    }  # fmt: skip
    assert {name: value for (name, reason), value in seen.items() if not reason} == expected
    assert {at: value for at, value in seen.items() if at[1]} == {
        ("external_prefix_cache_errors", "timeout"): 5, ("external_prefix_cache_errors", "protocol"): 1,
        ("external_prefix_cache_errors", "unfit_seal"): 2, ("external_prefix_cache_dropped", "quota"): 1,
        ("external_prefix_cache_fetch_seconds_bucket", "0.01"): 3,
        ("external_prefix_cache_fetch_seconds_bucket", "+Inf"): 4,
    }  # fmt: skip
    names = {name for name, _ in seen if "fetch_seconds" not in name}
    assert not names - METRICS.keys()


def test_without_a_store_nothing_is_told_of_one(exporter: ReplicaMetricsExporter, seen: Seen) -> None:
    exporter.export(replace(LOAD, kv_blocks_total=0, kv_blocks_free=0), None)
    assert not any("external" in name or "usage" in name for name, _ in seen)


def test_hits_of_its_own_never_shrink(exporter: ReplicaMetricsExporter, seen: Seen) -> None:
    """Tokens from the store count at once; the request that they were for counts when it begins."""
    for external in (100, 400, 400):
        exporter.export(replace(LOAD, external_hit_tokens=external), None)
    assert seen["prefix_cache_hits", ""] == 500
