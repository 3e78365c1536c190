"""`motley bench prefix`: its arithmetic, and a small run of all of it."""

from __future__ import annotations

import pytest

from motley.cluster.prefix import bench
from motley.cluster.prefix.bench_replicas import break_even
from motley.cluster.prefix.bench_routed import NONE, SEEN, UNSEEN, Fleet, routed
from motley.cluster.prefix.bench_simulated import GPUS, simulated
from motley.cluster.prefix.bench_trace import Trace
from motley.cluster.prefix.server import find_redis


def test_where_lines_cross_redis_begins_to_be_faster() -> None:
    assert break_even([(256, 256.0, 200.0), (512, 512.0, 300.0)], 128) == pytest.approx(100 / (1 - 100 / 256) * 1.0)
    assert break_even([(256, 256.0, 20.0), (512, 512.0, 40.0)], 128) == 128, "what is shorter is not stored"
    assert break_even([(256, 20.0, 256.0), (512, 40.0, 512.0)], 128) is None
    assert break_even([(256, 20.0, 256.0)], 128) is None


def test_a_slow_redis_is_of_use_to_slow_gpus_alone() -> None:
    def even(rate: float) -> dict[str, float]:
        rows = simulated(rate, 57_344, 32, (256, 2048), 16)
        assert {each["source"] for each in rows} == {"simulated"}
        return {each["workload"]["gpu"]: each["value"] for each in rows if each["metric"] == "break_even_prefix"}

    fast, slow = even(5e9), even(2e7)
    assert len(fast) == len(GPUS)
    assert set(slow) < set(fast)
    assert all(slow[gpu] >= fast[gpu] for gpu in slow)


def test_a_fleet_is_simulated_with_redis_seen_unseen_and_absent() -> None:
    plan = Fleet(seconds=10.0, warm_up_s=2.0, seeds=1, prefixes=40, requests_per_s=10.0)
    rows = list(routed(plan, 1e10, 57_344))
    assert {(each["metric"], each["peer"]) for each in rows} == {
        (metric, peer) for metric in ("routed_goodput", "routed_ttft") for peer in (UNSEEN, NONE)
    }
    assert {each["source"] for each in rows} == {"simulated"}
    assert SEEN not in {each["peer"] for each in rows}
    [without] = [each for each in rows if (each["metric"], each["peer"]) == ("routed_ttft", NONE)]
    assert without["ratio"] > 1.05, "what is fetched in no time is there sooner"
    slow = [each["value"] for each in routed(plan, 1e3, 57_344)]
    assert slow == [each["peer_value"] for each in routed(plan, 1e3, 57_344)], "what nobody fetches makes no difference"


@pytest.mark.skipif(find_redis()[0] is None, reason="no redis-server")
def test_all_of_it_in_small() -> None:
    small = Trace(
        shape="tiny", turns=1, tenants=2, prefix_tokens=128, question_tokens=8, requests=6, unique=2, output_tokens=2
    )
    plan = bench.Plan(
        tokens=(32,), connections=(1,), moved=2**23, repeats=1, shape="tiny", prefixes=(128, 256), asked=1, trace=small,
        fleet=Fleet(seconds=2.0, warm_up_s=1.0, seeds=1),
    )  # fmt: skip
    said: list[str] = []
    report = bench.run(plan, said.append)
    found = {(each["metric"], each["source"]) for each in report["rows"]}
    measured = {"get", "read_open_verify", "read_into_blocks", "set", "ttft_redis_hit", "ttft_local_hit"}
    assert found >= {(metric, "measured") for metric in (*measured, "shared_prefixes", "no_reuse")}
    assert found >= {(metric, "simulated") for metric in ("ttft_redis_hit", "routed_goodput", "routed_ttft")}
    local = [each["workload"] for each in report["rows"] if each["metric"] == "ttft_local_hit"]
    assert [each["reused_tokens"] for each in local] == [128, 256]
    assert "own KV alone" in " ".join(said)
