"""Series of a process, and how they are told: through Ray, and in the text that Prometheus reads."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from motley.cluster.metrics.metric_series import MetricSeries, series_of
from motley.cluster.metrics.metrics_table import METRICS
from motley.cluster.metrics.metrics_text import PREFIXES, render_metrics
from motley.cluster.metrics.ray_exporter import RayMetricsExporter
from motley.cluster.metrics.replica_metrics import replica_labels
from motley.cluster.transport.call_errors import MAX_CODES, OTHER, CallErrors
from motley.replicas.errors import EngineFault, InvalidRequest, Overloaded
from motley.replicas.kv.histogram import HistogramSnapshot
from motley.replicas.kv.prefix.prefix_stats import PrefixStats
from motley.replicas.kv.store.prefix_store import BreakerState, StoreStats
from motley.replicas.types import ModelInfo, ReplicaLoad, ReplicaProfile

PROFILE = ReplicaProfile(
    "r", ModelInfo("qwen", "qwen2", 100, 512, (1,), "float16", "none"), "cuda:0", "Tesla P40", "6.1", "fast", "f",
    1.0, 1.0, 100, 512,
)  # fmt: skip
LABELS = {"model_name": "qwen", "pool": "p40", "accelerator": "Tesla P40", "compute_capability": "6.1"}
LOAD = ReplicaLoad(
    running=3, waiting=2, swapped=1, kv_blocks_free=25, kv_blocks_total=100,
    queried_tokens=900, cached_tokens=600, drafted_tokens=50, accepted_tokens=20,
    external_queried_tokens=512, external_hit_tokens=256, preemptions_swapped=1, preemptions_recomputed=2,
)  # fmt: skip
STORE = StoreStats(
    reads=4, read_s=0.5, bytes_read=1000, writes=2, write_s=0.25, bytes_written=500, queued=7,
    errors={"timeout": 2}, dropped={"quota": 1}, breaker=BreakerState.OPEN,
)  # fmt: skip
FETCHED = HistogramSnapshot((0.01,), (3, 1), 0.25)
STATS = PrefixStats(512, 256, {"hit": 3, "miss": 1, "seal": 2}, 5, 1e9, 128, 1000, STORE, fetch_s=FETCHED)


def series(*sources: object) -> list[MetricSeries]:
    return [each for source in sources for each in series_of(source, LABELS)]


def values(found: list[MetricSeries]) -> dict[str, Any]:
    """Return the values by name, and the value of the metric's own label if it has one."""
    own = [" ".join(value for key, value in each.labels if key not in LABELS) for each in found]
    return {f"{each.name} {label}".strip(): each.value for each, label in zip(found, own, strict=True)}


def test_the_series_of_a_replica_are_what_it_has_counted() -> None:
    assert values(series(LOAD, STATS, STATS.store_with_misfits())) == {
        "num_requests_running": 3, "num_requests_waiting": 2, "num_requests_swapped": 1, "num_preemptions": 3,
        "kv_cache_usage_perc": 0.75, "cache_config_info 16 100": 1,
        "num_swaps": 1, "prefix_cache_queries": 900, "prefix_cache_hits": 344, "spec_decode_num_draft_tokens": 50,
        "spec_decode_num_accepted_tokens": 20, "external_prefix_cache_queries": 512, "external_prefix_cache_hits": 256,
        "external_prefix_cache_reads": 4, "external_prefix_cache_read_seconds": 0.5,
        "external_prefix_cache_read_bytes": 1000, "external_prefix_cache_writes": 2,
        "external_prefix_cache_write_seconds": 0.25, "external_prefix_cache_written_bytes": 500,
        "external_prefix_cache_breaker": 1, "external_prefix_cache_queued": 7,
        "external_prefix_cache_fetch_seconds": FETCHED, "external_prefix_cache_errors timeout": 2,
        "external_prefix_cache_errors unfit_seal": 2, "external_prefix_cache_dropped quota": 1,
    }  # fmt: skip
    assert replica_labels(PROFILE, "p40") == LABELS
    assert replica_labels(replace(PROFILE, compute_capability=None), "p40")["compute_capability"] == "none"


def test_without_a_store_nothing_is_told_of_one() -> None:
    found = values(series(replace(LOAD, kv_blocks_total=0, kv_blocks_free=0)))
    assert not any("external" in name or "usage" in name for name in found)


def test_hits_of_its_own_do_not_count_those_of_the_store() -> None:
    assert values(series(replace(LOAD, external_hit_tokens=100)))["prefix_cache_hits"] == 500


def test_errors_are_counted_by_code_and_codes_are_bounded() -> None:
    errors = CallErrors()
    for error in (Overloaded("full", code="queue_full"), InvalidRequest("n: no", param="n"), EngineFault("broken")):
        errors.add(error)
    found = {name: value for name, value in values(series(errors)).items() if value}
    assert found == {
        "request_refusals queue_full": 1,
        "request_refusals invalid_value": 1,
        "request_errors engine_fault": 1,
    }
    for number in range(2 * MAX_CODES):
        errors.add(InvalidRequest("no", code=f"code_{number}"))
    assert len(errors.refused) <= MAX_CODES + 1
    assert errors.refused[OTHER] > MAX_CODES - 10


def test_through_ray_they_are_gauges_with_the_names_that_prometheus_gives() -> None:
    seen: dict[tuple[str, str], float] = {}

    def gauge(name: str, description: str, tag_keys: tuple[str, ...]) -> Any:
        def put(value: float, labels: dict[str, str]) -> None:
            assert set(labels) == set(tag_keys)
            assert labels.items() >= LABELS.items()
            seen[name, labels.get("reason", "") or labels.get("le", "")] = value

        assert description
        return SimpleNamespace(set=put)

    exporter = RayMetricsExporter(SimpleNamespace(Gauge=gauge))
    for _ in range(2):
        exporter.export(series(LOAD, STATS, STORE))
    later = replace(STORE, errors={"timeout": 5})
    exporter.export(series(replace(LOAD, running=0, queried_tokens=950), later))
    fetch = "motley_external_prefix_cache_fetch_seconds"
    expected = {
        ("motley_num_requests_running", ""): 0,
        ("motley_prefix_cache_queries_total", ""): 950,
        ("motley_kv_cache_usage_perc", ""): 0.75,
        ("motley_external_prefix_cache_errors_total", "timeout"): 5,
        (f"{fetch}_bucket", "0.01"): 3,
        (f"{fetch}_bucket", "+Inf"): 4,
        (f"{fetch}_sum", ""): 0.25,
        (f"{fetch}_count", ""): 4,
    }
    assert {key: seen[key] for key in expected} == expected


@pytest.mark.parametrize("accept", ["", "text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0"])
def test_the_text_is_what_prometheus_reads(accept: str) -> None:
    text, media_type = render_metrics(series(LOAD, STATS, STORE), accept)
    assert media_type.startswith(accept.partition(";")[0] or "text/plain")
    if "openmetrics" in accept:
        assert text.endswith(b"# EOF\n")
        return
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert families.keys() == {f"motley_{each.name}" for each in series(LOAD, STATS, STORE)}
    for name, family in families.items():
        metric = METRICS[name.removeprefix("motley_")]
        assert (family.type, family.documentation) == (metric.kind, metric.description)
        assert all(sample.labels.items() >= LABELS.items() for sample in family.samples)
    [running] = families["motley_num_requests_running"].samples
    assert (running.name, running.value) == ("motley_num_requests_running", 3)
    [queries] = families["motley_prefix_cache_queries"].samples
    assert (queries.name, queries.value) == ("motley_prefix_cache_queries_total", 900)
    fetched = {
        (each.name[-6:], each.labels.get("le")): each.value
        for each in families["motley_external_prefix_cache_fetch_seconds"].samples
    }
    assert fetched == {("bucket", "0.01"): 3, ("bucket", "+Inf"): 4, ("_count", None): 4, ("ds_sum", None): 0.25}


def test_vllms_names_are_told_beside_ours_where_asked_for() -> None:
    text, _ = render_metrics(series(LOAD), "", PREFIXES)
    ours = {line.removeprefix("motley_") for line in text.decode().splitlines() if line.startswith("motley_")}
    theirs = {line.removeprefix("vllm:") for line in text.decode().splitlines() if line.startswith("vllm:")}
    assert ours == theirs != set()


OTHERS_HAVE = ("kv_offload_", "nixl_")  # of vLLM's connectors, in whose place Motley has the prefix store


def test_rays_dashboard_for_language_models_asks_for_what_there_is() -> None:
    """Its queries differ from those for Motley by the prefix alone."""
    panels = Path(ray.__file__).parent / "dashboard/modules/metrics/dashboards/serve_llm_dashboard_panels.py"
    asked = set(re.findall(r"ray_vllm_(\w+)", panels.read_text()))
    assert len(asked) > 20
    told = {
        name + suffix
        for name, metric in METRICS.items()
        for suffix in {"counter": ("_total",), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}[
            metric.kind
        ]
    }
    assert {name for name in asked - told if not name.startswith(OTHERS_HAVE)} == set()
    gateway = {"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"}
    assert gateway <= told, "what the Gateway API's endpoint picker reads"
