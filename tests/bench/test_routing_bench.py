"""Routers of the benchmark on fleets in virtual time: nothing is lost, and the optimum is a bound for all of them."""

import pytest

from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.simulation.fleet_simulation import simulate
from motley.cluster.simulation.motley_router import MotleyRouter
from motley.cluster.simulation.simulated_fleet import find_model_shape, simulated_fleet
from motley.cluster.simulation.simulation_metrics import measure_outcome
from motley.cluster.simulation.traffic import poisson_arrivals
from motley.replicas.errors import InvalidRequest
from motley_bench.routing import router_comparison
from motley_bench.routing.baseline_routers import BASELINES, BaselineRouter, RequestCap
from motley_bench.routing.fleet_optimum import capacity, length_buckets, optimum
from motley_bench.routing.router_comparison import merge_reports, run, text
from motley_bench.routing.routing_plan import MOTLEY, TRUE_SPEEDS, RoutingBenchPlan, SimulationSize

SLO = Slo(3.0, 0.1)
MODEL = find_model_shape("qwen2.5-7b")


def a_run(name, rate=6.0, seconds=20.0, cap=None):
    replicas = simulated_fleet("P40+T4+A10", MODEL, 1)

    def make(seed):
        if name == MOTLEY:
            return MotleyRouter(replicas, SLO, seed)
        return BaselineRouter(replicas, SLO, seed, BASELINES[name].policy, cap)

    traffic = list(poisson_arrivals(rate, seconds, 3))
    return replicas, traffic, simulate(replicas, traffic, [make(0), make(1)], 5)


@pytest.mark.parametrize("name", BASELINES)
def test_everything_that_a_baseline_takes_ends_once(name):
    _, traffic, outcome = a_run(name)
    assert len(outcome.jobs) == len(traffic) > 80
    for job, arrival, replica in zip(outcome.jobs, traffic, outcome.replicas, strict=True):
        assert job.sent_s == arrival.at_s
        assert (job.first_s is None) == (job.done_s is None) == (replica is None)
        assert replica is None or arrival.at_s < job.first_s <= job.done_s


def test_no_replica_has_more_than_its_limit():
    _, _, outcome = a_run("two choices", 30.0, 10.0, RequestCap(2))
    for job, replica in zip(outcome.jobs, outcome.replicas, strict=True):
        others = [
            other
            for other, there in zip(outcome.jobs, outcome.replicas, strict=True)
            if there == replica is not None and other.sent_s <= job.sent_s < other.done_s
        ]
        assert len(others) <= 2 * 2, "each of two routers hears late of what the other sends"
    assert None in outcome.replicas, "it is refused"


@pytest.mark.parametrize("rate", [3.0, 12.0])  # within the fleet's capacity, and far beyond it
def test_no_router_does_better_than_the_optimum(rate):
    for name in (MOTLEY, "weighted least work"):
        replicas, traffic, outcome = a_run(name, rate, 40.0)
        bound = optimum(replicas, length_buckets(traffic, 40.0), SLO)
        assert measure_outcome(outcome, SLO, 0.0, 40.0).goodput <= bound * 1.02  # 40 s are not for ever


def test_the_optimum_grows_with_the_fleet_and_stays_below_what_is_offered():
    traffic = list(poisson_arrivals(8.0, 50.0, 1))
    kinds = length_buckets(traffic, 50.0)
    assert sum(kind.rate for kind in kinds) == pytest.approx(len(traffic) / 50.0)
    one, two, many = (optimum(simulated_fleet(text, MODEL, 1), kinds, SLO) for text in ("T4", "T4+P40", "3*A10+T4+P40"))
    assert 0 < one < two < many <= len(traffic) / 50.0 + 1e-6
    assert capacity(simulated_fleet("A10", MODEL, 1), kinds, SLO) < capacity(
        simulated_fleet("2*A10", MODEL, 1), kinds, SLO
    )


def test_a_request_too_long_for_the_objective_is_in_nobodys_optimum():
    traffic = [each for each in poisson_arrivals(20.0, 50.0, 1) if each.prompt_tokens > 2000]
    kinds = length_buckets(traffic, 1000.0)
    assert optimum(simulated_fleet("8*P40", MODEL, 1), kinds, SLO) == pytest.approx(0.0)


@pytest.mark.slow("Simulates each router with every limit that it may have")
@pytest.mark.thorough
def test_the_benchmark_says_that_it_is_simulated(monkeypatch):
    workload = {"replicas": 16, "prompt_tokens": 64}
    decision = {"metric": "decision", "workload": workload, "value": 9.0, "source": "measured"}
    recording = {"metric": "recording", "workload": {"replicas": 16}, "value": 4.0, "source": "measured"}
    monkeypatch.setattr(router_comparison, "measure_decisions", lambda: [decision])  # test_decision.py has both
    monkeypatch.setattr(router_comparison, "measure_recording", lambda: [recording])
    monkeypatch.setattr(router_comparison, "TUNED_AT", (0.9,))
    plan = RoutingBenchPlan(
        fleets=["T4+A10"],
        reuse=["low"],
        size=SimulationSize(loads=[0.8], seeds=[1], requests=30, seconds=(4.0, 4.0), warm_up_s=1.0),
        processes=1,
    )
    report = run(plan)
    goodputs = [row for row in report["rows"] if row["metric"] == "goodput"]
    assert {row["peer"] for row in goodputs} == {"optimum", TRUE_SPEEDS, *BASELINES}
    assert {row["source"] for row in goodputs} == {"simulated"}
    assert [row["source"] for row in report["rows"] if row["metric"] == "decision"] == ["measured"]
    assert "simulated" in text(report)
    assert "decision among 16 replicas, prompt of 64 tokens: 9 µs (measured)" in text(report)
    assert "record of one among 16 replicas: 4.0 µs (measured)" in text(report)
    another = report | {"rows": [row | {"workload": row["workload"] | {"fleet": "another"}} for row in goodputs]}
    assert len(merge_reports(report, another)["rows"]) == len(report["rows"]) + len(goodputs)
    assert merge_reports(report, report)["rows"] == report["rows"]
    with pytest.raises(InvalidRequest, match="settings"):
        merge_reports(report, report | {"settings": {}})
