"""`motley bench prefix`: its arithmetic, and a small run of all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from motley_bench.checkpoints.random_checkpoint import SHAPES, CheckpointShape
from motley_bench.commands.bench_prefix import prefix
from motley_bench.prefix import prefix_benchmark
from motley_bench.prefix.foreign_kv import WAYS, NumericsPlan
from motley_bench.prefix.prefix_first_tokens import break_even
from motley_bench.prefix.redis_fault_kinds import KINDS
from motley_bench.prefix.redis_fault_load import FaultBenchAnswer, FaultSamples, RedisFaultPlan
from motley_bench.prefix.redis_faults import _rows, measure_faults
from motley_bench.prefix.routed_savings import NONE, SEEN, UNSEEN, RoutedFleetPlan, simulate_routed_fleet
from motley_bench.prefix.simulated_savings import GPUS, simulate_savings
from motley_bench.prefix.tenant_trace import TenantTracePlan


def test_where_lines_cross_redis_begins_to_be_faster() -> None:
    assert break_even([(256, 256.0, 200.0), (512, 512.0, 300.0)], 128) == pytest.approx(100 / (1 - 100 / 256) * 1.0)
    assert break_even([(256, 256.0, 20.0), (512, 512.0, 40.0)], 128) == 128, "what is shorter is not stored"
    assert break_even([(256, 20.0, 256.0), (512, 40.0, 512.0)], 128) is None
    assert break_even([(256, 20.0, 256.0)], 128) is None


def test_a_slow_redis_is_of_use_to_slow_gpus_alone() -> None:
    def even(rate: float) -> dict[str, float]:
        rows = simulate_savings(rate, 57_344, 32, (256, 2048), 16)
        assert {each["source"] for each in rows} == {"simulated"}
        return {each["workload"]["gpu"]: each["value"] for each in rows if each["metric"] == "break_even_prefix"}

    fast, slow = even(5e9), even(2e7)
    assert len(fast) == len(GPUS)
    assert set(slow) < set(fast)
    assert all(slow[gpu] >= fast[gpu] for gpu in slow)


@pytest.mark.slow("Simulates thirty seconds of a fleet with each router and seed")
def test_a_fleet_is_simulated_with_redis_seen_unseen_and_absent() -> None:
    plan = RoutedFleetPlan(seconds=20.0, warm_up_s=10.0, seeds=3, requests_per_s=12.0)
    rows = list(simulate_routed_fleet(plan, 1e10, 57_344))
    assert {(each["metric"], each["peer"]) for each in rows} == {
        (metric, peer) for metric in ("routed_goodput", "routed_ttft") for peer in (UNSEEN, NONE)
    }
    assert {each["source"] for each in rows} == {"simulated"}
    assert SEEN not in {each["peer"] for each in rows}
    [without] = [each for each in rows if (each["metric"], each["peer"]) == ("routed_ttft", NONE)]
    assert without["ratio"] > 1.05, "what is fetched in no time is there sooner"
    short = replace(plan, seconds=10.0, warm_up_s=2.0, seeds=1)
    slow = list(simulate_routed_fleet(short, 1e3, 57_344))
    assert [each["value"] for each in slow] == [each["peer_value"] for each in slow], (
        "what nobody fetches makes no difference"
    )


def test_all_of_it_in_small() -> None:
    small = TenantTracePlan(
        shape="tiny",
        turns=1,
        tenants=2,
        prefix_tokens=128,
        question_tokens=8,
        requests=6,
        unique=2,
        control_turns=2,
        output_tokens=2,
    )
    plan = prefix_benchmark.PrefixBenchPlan(
        tokens=(32,), connections=(1, 2), moved=2**23, repeats=1, shape="tiny", prefixes=(128, 256),
        requests_per_prefix=1, trace=small,
        faults=RedisFaultPlan(shape="tiny", kinds=("restarted empty",), prefix_tokens=512, rounds=1),
        numerics=NumericsPlan(ways=WAYS[:2], prefix=64, texts=1), fleet=RoutedFleetPlan(seconds=2.0, warm_up_s=1.0,
        seeds=1),
    )  # fmt: skip
    said: list[str] = []
    report = prefix_benchmark.run(plan, said.append)
    found = {(each["metric"], each["source"]) for each in report["rows"]}
    measured = {"get", "read_open_verify", "read_into_blocks", "set", "ttft_redis_hit", "ttft_local_hit"}
    assert found >= {
        (metric, "measured")
        for metric in (*measured, "shared_prefixes", "replaced_replicas", "no_reuse", "fault_recovery", "numerics_kl")
    }
    assert found >= {(metric, "simulated") for metric in ("ttft_redis_hit", "routed_goodput", "routed_ttft")}
    local = [each["workload"] for each in report["rows"] if each["metric"] == "ttft_local_hit"]
    assert [each["reused_tokens"] for each in local] == [128, 256]
    assert {"shared prefixes, turn 1", "replaced replicas, turn 1", "no reuse, turn 2"} <= set(said)
    trace = {each["metric"]: each["workload"] for each in report["rows"] if "ratio_of_turns" in each["workload"]}
    assert {name: each["requests"] for name, each in trace.items()} == {
        "shared_prefixes": 6, "replaced_replicas": 6, "replaced_replicas_ttft": 6, "no_reuse": 4,
    }  # fmt: skip
    assert trace["no_reuse"]["reused"] == trace["no_reuse"]["reused_without"] == 0


def test_a_part_is_measured_alone() -> None:
    plan = prefix_benchmark.quick(("simulated",))
    report = prefix_benchmark.run(
        replace(plan, moved=2**22, repeats=1, fleet=RoutedFleetPlan(seconds=2.0, warm_up_s=1.0, seeds=1)), str
    )
    metrics = {each["metric"] for each in report["rows"] if each["source"] == "measured"}
    assert metrics == {"get", "set", "read_open_verify", "read_into_blocks"}, "whose rate it is about"
    assert any(each["source"] == "simulated" for each in report["rows"])


@pytest.mark.thorough
def test_no_request_fails_whatever_redis_does_and_it_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Little KV, dear to compute: even on a busy machine it pays to read it.
    monkeypatch.setitem(SHAPES, "wide", CheckpointShape(768, 3_072, 2, 12, 2, 4_096))
    plan = RedisFaultPlan(shape="wide", prefix_tokens=256, rounds=1)
    rows = measure_faults(plan, b"a secret of the tests alone, 32 bytes", lambda line: None)
    assert {each["workload"]["redis"] for each in rows} == set(KINDS)
    assert {each["value"] for each in rows if each["metric"] == "fault_failed_requests"} == {0}
    assert all(each["workload"]["requests"] > 0 for each in rows)
    assert not [each["workload"]["redis"] for each in rows if "hits_after_it" in each["workload"]], "never read again"


def test_requests_that_fail_and_answers_that_differ_are_told() -> None:
    responses = [FaultBenchAnswer(0.0, 0.2), FaultBenchAnswer(0.0, 0.4), FaultBenchAnswer(0.0, failed=True)]
    found = FaultSamples(
        sharing=responses,
        alone=[FaultBenchAnswer(0.0, 0.1), FaultBenchAnswer(0.0, 0.1), FaultBenchAnswer(0.0, 0.1)],
        failed=1,
    )
    rows = {each["metric"]: each for each in _rows(RedisFaultPlan(shape="tiny"), "SIGKILL", found)}
    assert rows["fault_failed_requests"]["value"] == 1
    assert rows["fault_ttft_p95"]["value"] == pytest.approx(390)
    assert rows["fault_ttft_p95_over_recompute"]["value"] == pytest.approx(290)
    assert rows["fault_recovery"]["workload"]["hits_after_it"] == "none"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "somewhere"}, "are given together"),
        ({"text": Path(__file__)}, "are given together"),
        ({"model": "somewhere", "text": Path(__file__), "part": ["ttft"]}, "are of the part numerics"),
    ],
)
def test_a_model_that_would_not_be_measured_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        prefix(**given)
