"""Tests of what the time of a decision includes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from motley.cluster.routing.directory import prediction_cache
from motley.cluster.routing.directory.replica_directory import ReplicaDirectory
from motley.cluster.routing.explanation.route_record import RouteRecord
from motley.cluster.routing.prediction.latency_model import LatencyModel
from motley.cluster.routing.queueing.request_queue import RequestQueue
from motley_bench.routing import decision_latency


def test_it_is_of_all_that_is_decided_and_of_one_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_cache, "SAME_S", 60.0)  # however busy the machine is
    requested: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        counted = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            requested[name] += 1
            return counted(*args, **options)

        monkeypatch.setattr(owner, name, called)

    for owner, name in (
        (ReplicaDirectory, "soonest"),
        (RequestQueue, "wait_turn"),
        (ReplicaDirectory, "dispatch"),
        (LatencyModel, "predict_parts"),
    ):
        count(owner, name)
    monkeypatch.setattr(decision_latency, "REPLICAS", (16,))
    rows = list(decision_latency.measure_decisions())
    samples = len(decision_latency.PROMPTS) * decision_latency._TURNS
    assert [row["workload"]["prompt_tokens"] for row in rows] == list(decision_latency.PROMPTS)
    assert requested["soonest"] == requested["wait_turn"] == samples
    assert requested["dispatch"] == requested["predict_parts"] == samples + len(decision_latency.PROMPTS), (
        "and one that is sent first"
    )


def test_a_record_is_measured_with_all_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[RouteRecord] = []
    placed = RouteRecord.placed
    monkeypatch.setattr(RouteRecord, "placed", lambda record, *args: (kept.append(record), placed(record, *args)))
    monkeypatch.setattr(decision_latency, "REPLICAS", (16,))
    monkeypatch.setattr(decision_latency, "_TURNS", decision_latency._WARM_UP + 1)
    [row] = decision_latency.measure_recording()
    assert (row["metric"], row["workload"]) == ("recording", {"replicas": 16})
    assert len(kept) == decision_latency._TURNS * decision_latency._RECORDS
    assert {(one.outcome, len(one.attempts[0].predictions)) for one in kept} == {("answered", 8)}
