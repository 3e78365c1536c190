"""`motley bench fleet`: its other side is power of two choices, and what it reports is what clients saw."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.routing.policy.predicted_latency import PredictedLatency
from motley.cluster.routing.policy.routing_policies import create_routing_policy
from motley.cluster.routing.prediction.latency_model import LatencyModel, ReplicaSpeed, RoutingQuery
from motley.cluster.routing.prediction.latency_model import Slo as Objectives
from motley.replicas.types import PROFILED_BATCH_SIZES
from motley_bench.fleet import live_fleet as bench
from motley_bench.fleet.core_usage import CoreUsage
from motley_bench.fleet.fleet_plan import FLEET, FleetBenchPlan
from motley_bench.load.request_samples import OK, BenchSlo, LoadOutcome, RequestSample

PLAN = FleetBenchPlan(rate=1.0, seconds=10.0, warmup_s=2.0, turns=1)


def a_speed(factor: float) -> ReplicaSpeed:
    return ReplicaSpeed(1000.0 * factor, (0.02 / factor,) * len(PROFILED_BATCH_SIZES), 0.0, 512, 64, 1 << 17)


def test_two_choices_take_the_less_loaded_of_two_whatever_their_speeds() -> None:
    directory = LatencyModel([a_speed(1.0), a_speed(20.0), a_speed(5.0)], Objectives(2.0, 0.1))
    directory.sent(0.0, 0, 10)
    directory.sent(0.0, 1, 10, sequences=2)
    query = RoutingQuery(100)
    replicas, policy = directory.candidates(0.0, query), create_routing_policy(bench.POLICIES[bench.TWO_CHOICES])
    assert PredictedLatency(random.Random(0)).order(query, replicas)[0] == 1, "Motley takes the fast one"
    first = Counter(policy.order(query, replicas)[0] for _ in range(600))
    assert first[1] == 0, "it is never the less loaded of two"
    assert first[2] == pytest.approx(400, abs=60)
    assert all(sorted(policy.order(query, replicas)) == [0, 1, 2] for _ in range(20))
    for row in range(3):
        directory.remove(row)
    assert policy.order(query, directory.candidates(0.0, query)) == []


def test_a_policy_of_the_benchmark_sees_all_replicas() -> None:
    """They are far more than Motley would try; the fastest are no likelier to be drawn than the others."""
    directory, query = LatencyModel([a_speed(1.0 + number) for number in range(100)], None), RoutingQuery(100)
    policy = create_routing_policy(bench.POLICIES[bench.TWO_CHOICES], random.Random(0))
    drawn = Counter(policy.order(query, directory.candidates(0.0, query))[0] for _ in range(2000))
    assert len(drawn) == 100
    assert sum(drawn[row] for row in range(50)) == pytest.approx(1000, abs=120)


def turn(*samples: RequestSample) -> bench._PlacementTurn:
    return bench._PlacementTurn(LoadOutcome(samples=list(samples)), {"p40": 100, "cpu": 300}, {"idle": 0.5})


def test_what_is_told_is_what_clients_saw() -> None:
    good, late = (RequestSample(at, at, at + 3, OK, at + first, at + 3, 31) for at, first in ((3.0, 0.5), (4.0, 2.5)))
    refused, early = RequestSample(5.0, 5.0, 5.1, "RESOURCE_EXHAUSTED"), RequestSample(0.0, 0.0, 9.0, OK, 8.0, 9.0, 5)
    sides = {bench.MOTLEY: [turn(early, good)], bench.TWO_CHOICES: [turn(good, late, refused)]}
    slo = BenchSlo(2.0, 0.1)
    rows = {row["metric"]: row for row in bench._rows(PLAN, slo, sides)}
    assert (rows["goodput"]["value"], rows["goodput"]["peer_value"]) == (0.1, 0.1)
    assert (rows["in time"]["value"], rows["in time"]["peer_value"]) == (100.0, pytest.approx(100 / 3))
    assert rows["ttft p99"]["ratio"] == pytest.approx(2480 / 500)
    assert {row["source"] for row in rows.values()} == {"simulated"}
    ours, theirs = (bench._turn_report(PLAN, slo, 0, turns[0]) for turns in sides.values())
    assert (ours["requests"], ours["met"], theirs["requests"], theirs["met"]) == (1, True, 3, False)
    assert theirs["ended"] == {OK: 2, "RESOURCE_EXHAUSTED": 1}
    assert theirs["prompt_tokens_by_pool"] == {"p40": 0.25, "cpu": 0.75}


def test_its_fleet_is_one() -> None:
    spec = FleetSpec.model_validate(FLEET)
    assert spec.slo is not None
    assert [pool.name for pool in spec.pools if pool.simulate is None] == ["cpu"]
    assert len({pool.simulate for pool in spec.pools}) == 5


def test_cores_are_told_by_who_uses_them() -> None:
    cores = CoreUsage(os.getpid(), lambda name: "tests")
    until = os.times().user + 0.2
    while os.times().user < until:
        pass
    assert cores.used()["tests"] > 0
    assert bench._part("ray::ServeReplica:motley:cpu.initialize") == "cpu"
    assert bench._part("ray::ServeReplica:motley:ingress") == "ingress"
