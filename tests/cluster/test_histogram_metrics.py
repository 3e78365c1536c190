"""Histograms of latencies: counted by messages, and told as the series that Prometheus reads."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from engine_parts import Clock
from hypothesis import given

from motley.cluster.routing.ingress_stats import IngressStats, PoolLatencies
from motley.cluster.service.deployment import histogram_metrics
from motley.cluster.service.deployment.histogram_metrics import (
    HistogramExporter,
    LatencyMetricsExporter,
    export_latencies,
)
from motley.cluster.service.deployment.metrics_table import METRICS
from motley.replicas.kv.histogram import Histogram, HistogramSnapshot
from motley.replicas.types import Delta, Request, SamplingParams, StreamMessage


def spreads(*messages: tuple[float, int], choices: int = 1, ends: float = 0.0) -> dict[str, HistogramSnapshot]:
    """Return the histograms of a request whose messages came so many seconds after the one before, with so many tokens
    each.
    """
    clock = Clock()
    tally = IngressStats(None, clock)
    with tally.counted(Request("r", (1, 2), SamplingParams(n=choices, seed=0))) as seen:
        for seconds, tokens in messages:
            clock.now += seconds
            seen.message(message(tokens), "cpu")
        clock.now += ends
    return tally.latencies["cpu"].spreads() if tally.latencies else {}


def message(tokens: int) -> StreamMessage:
    return StreamMessage((Delta(0, tuple(range(tokens))),))


def told(**of: HistogramSnapshot) -> dict[str, tuple[int, float]]:
    return {name.split("_")[0]: (spread.count, pytest.approx(spread.total)) for name, spread in of.items()}


def test_first_tokens_gaps_and_ends_are_counted_message_by_message() -> None:
    found = spreads((0.5, 1), (0.1, 3), (0.2, 0), (0.3, 1), ends=1.0)
    assert told(**found) == {"time": (1, 0.5), "inter": (2, 0.6), "e2e": (1, 2.1)}, "one message had no token"


def test_an_answer_in_one_message_tells_nothing_of_its_first_token() -> None:
    assert told(**spreads((2.0, 9))) == {"time": (0, 0.0), "inter": (0, 0.0), "e2e": (1, 2.0)}
    assert told(**spreads((2.0, 1)))["time"] == (1, 2.0), "but of its only one"
    assert told(**spreads((2.0, 2), choices=2))["time"] == (1, 2.0)


def test_a_request_that_said_nothing_is_in_none() -> None:
    assert not spreads(ends=3.0)
    assert not spreads((1.0, 0), ends=3.0)


def test_of_a_request_that_moves_each_pool_has_what_came_from_there() -> None:
    clock = Clock()
    tally = IngressStats(None, clock)
    with tally.counted(Request("r", (1, 2), SamplingParams(seed=0))) as seen:
        for seconds, pool in ((0.5, "a"), (4.0, "b"), (0.1, "b"), (2.0, "a")):
            clock.now += seconds
            seen.message(message(1), pool)
        clock.now += 1.0
    a, b = (told(**tally.latencies[pool].spreads()) for pool in ("a", "b"))
    assert a == {"time": (1, 0.5), "inter": (1, 2.0), "e2e": (1, 7.6)}
    assert b == {"time": (0, 0.0), "inter": (2, 4.1), "e2e": (0, 0.0)}


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0.001, 50), unique=True, min_size=1))
def test_buckets_hold_what_is_up_to_their_bounds(values: list[float], bounds: list[float]) -> None:
    histogram = Histogram(sorted(bounds))
    for value in values:
        histogram.add(value)
    *within, (last, every) = histogram.spread().cumulative()
    assert [count for _, count in within] == [sum(value <= bound for value in values) for bound in sorted(bounds)]
    assert (last, every) == ("+Inf", len(values))
    assert histogram.spread().total == pytest.approx(sum(values))


def test_they_are_told_as_prometheus_names_a_histogram() -> None:
    seen: dict[tuple[str, str], float] = {}

    def gauge(name: str, description: str, tag_keys: tuple[str, ...]) -> Any:
        def put(value: float, labels: dict[str, str]) -> None:
            assert set(labels) == set(tag_keys)
            assert labels["model_name"] == "tiny"
            seen[name, labels.get("le", "")] = value

        assert description
        return SimpleNamespace(set=put)

    exporter = HistogramExporter({"model_name": "tiny"}, SimpleNamespace(Gauge=gauge))
    name = "time_to_first_token_seconds"
    exporter.export(name, HistogramSnapshot((0.1, 2.5), (0, 0, 0), 0.0))
    assert not seen, "nothing is a zero that only stands for nothing"
    exporter.export(name, HistogramSnapshot((0.1, 2.5), (3, 1, 1), 9.5))
    bucket = f"motley_{name}_bucket"
    assert seen == {
        (bucket, "0.1"): 3, (bucket, "2.5"): 4, (bucket, "+Inf"): 5,
        (f"motley_{name}_sum", ""): 9.5, (f"motley_{name}_count", ""): 5,
    }  # fmt: skip
    histograms = {name for name, metric in METRICS.items() if metric.kind == "histogram"}
    assert set(spreads((1.0, 1))) | {"external_prefix_cache_fetch_seconds"} == histograms


def test_an_ingress_tells_them_by_pool_and_of_those_that_come_later() -> None:
    seen: dict[tuple[str, str], float] = {}

    def gauge(name: str, description: str, tag_keys: tuple[str, ...]) -> Any:
        def put(value: float, labels: dict[str, str]) -> None:
            assert set(labels) == set(tag_keys) >= {"model_name", "pool"}
            seen[name, labels["pool"]] = value

        return SimpleNamespace(set=put)

    pools = {"t4": PoolLatencies()}
    exporter = LatencyMetricsExporter(pools, "tiny", SimpleNamespace(Gauge=gauge))
    pools["t4"].gap(0.5)
    exporter.export()
    count = "motley_inter_token_latency_seconds_count"
    assert seen[count, "t4"] == 1
    pools["cpu"] = PoolLatencies()
    pools["cpu"].gap(2.0)
    pools["cpu"].first(1.0)
    exporter.export()
    assert (seen[count, "t4"], seen[count, "cpu"]) == (1, 1)
    first = {pool for name, pool in seen if name == "motley_time_to_first_token_seconds_count"}
    assert first == {"cpu"}


async def test_an_error_does_not_end_them(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged when it begins, not each second; and once it is gone the histograms are published again."""
    calls, published = 0, asyncio.Event()

    def publish(exporter: LatencyMetricsExporter) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 3, 5):
            raise RuntimeError("no metrics agent")
        if calls == 6:
            published.set()

    monkeypatch.setattr(histogram_metrics, "PERIOD_S", 0.0)
    monkeypatch.setattr(LatencyMetricsExporter, "export", publish)
    with caplog.at_level(logging.ERROR):
        task = asyncio.create_task(export_latencies({}, "tiny"))
        await published.wait()
        task.cancel()
    logged = [record for record in caplog.records if record.name == histogram_metrics.log.name]
    assert [record.exc_text is not None for record in logged] == [True, True]
