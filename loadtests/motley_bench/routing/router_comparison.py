"""Benchmark `motley bench routing`: one trace through several routers, on simulated fleets, beside the optimum.

Everything is simulated except the time that a decision takes, and every row says which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from motley.cluster.simulation.fleet_simulation import SimulatedRouter, simulate
from motley.cluster.simulation.motley_router import MotleyRouter
from motley.cluster.simulation.simulated_fleet import SimulatedReplica, find_model_shape, simulated_fleet
from motley.cluster.simulation.simulation_metrics import SimulationMetrics, average_metrics, measure_outcome
from motley.replicas.errors import InvalidRequest
from motley.replicas.host.cpu_cores import usable_cores
from motley.replicas.host.measurement_rows import machine, row, versions

from .baseline_routers import BASELINES, BaselineRouter, RequestCap
from .decision_latency import measure_decisions, measure_recording
from .fleet_optimum import capacity, length_buckets, optimum
from .routing_plan import MOTLEY, ONE_OF_EACH, TRUE_SPEEDS, WITHOUT, RoutingBenchPlan, RoutingRun, SimulationSize

Progress = Callable[[str], None]

TUNING = 101  # seed of the runs on which baselines are tuned
TUNED_AT = (0.9, 1.1)  # loads for tuning, as shares of capacity: a limit must do well below and above it
# Smaller fleets of the same classes, on which the limits of large ones are tuned, since limits are per replica.
_SMALLER = {"classes": ONE_OF_EACH, "thousand": ONE_OF_EACH}
INGRESSES = 2
AFTER_S = 15.0  # time for which requests continue after the counted ones, so that the fleet does not empty


Tuned = dict[
    tuple[str, str, SimulationSize], dict[str, RequestCap | None]
]  # by fleet, reuse and size: each baseline's best limit


def run(plan: RoutingBenchPlan, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Run the benchmark and return its report. Raises InvalidRequest for an unknown fleet or model."""
    for name in plan.fleets:
        simulated_fleet(name, find_model_shape(plan.model), 0)  # raises before anything is started
    before = machine()
    rows: list[dict[str, Any]] = []
    processes = plan.processes or usable_cores()
    tuned: Tuned = {}  # shared by fleets of the same classes
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for name in plan.fleets:
            for reuse in plan.reuse:
                rows += _compare(plan, name, reuse, pool, tuned, progress)
    progress("how long a decision takes")
    rows += measure_decisions()
    rows += measure_recording()
    return {
        "bench": "routing",
        "machine": before,
        "versions": versions("motley", "numpy", "scipy"),
        "settings": {
            "model": plan.model, "tuning_seed": TUNING, "tuned_at": list(TUNED_AT), "ingresses": INGRESSES,
            "after_s": AFTER_S, "ttft_s": plan.slo.ttft_s, "tpot_s": plan.slo.tpot_s,
        },
        "rows": rows,
    }  # fmt: skip


def merge_reports(report: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the report with another report's rows added where it has none of that kind.

    Raises InvalidRequest if the other was run with different settings or versions.
    """
    for each in ("settings", "versions"):
        if other.get(each) != report[each]:
            raise InvalidRequest(f"{each}: {other.get(each)} in the file; expected {report[each]}", param=each)
    own = {_place(each) for each in report["rows"]}
    return report | {"rows": [each for each in other["rows"] if _place(each) not in own] + report["rows"]}


def _place(line: dict[str, Any]) -> tuple[str, ...]:
    workload = line["workload"]
    return (line["metric"], str(workload.get("fleet")), str(workload.get("reuse")))


def _compare(
    plan: RoutingBenchPlan, name: str, reuse: str, pool: ProcessPoolExecutor, tuned: Tuned, progress: Progress
) -> list[dict[str, Any]]:
    size = plan.size_of(name)
    base = RoutingRun(MOTLEY, None, name, plan.model, reuse, plan.slo, 1.0, 1.0, size.warm_up_s, TUNING)
    cap_of = _tune_caps(plan, base, pool, tuned, progress)
    routers = [MOTLEY, TRUE_SPEEDS, *((WITHOUT,) if reuse != "low" else ()), *BASELINES]
    cells: dict[tuple[float, str], list[tuple[RoutingRun, Future[SimulationMetrics]]]] = {}
    for seed in size.seeds:
        max_load = _capacity(replace(base, seed=seed))
        for load in size.loads:
            for router in routers:
                one = _size_run(size, replace(base, router=router, cap=cap_of.get(router), seed=seed), load * max_load)
                cells.setdefault((load, router), []).append((one, pool.submit(_measure, one)))
    bounds = {load: [_optimum_bound(one) for one, _ in cells[load, MOTLEY]] for load in size.loads}
    rows = []
    for load in size.loads:
        found: dict[str, SimulationMetrics] = {}
        for router in routers:
            progress(f"{name}, {reuse} reuse, {load:.0%} of capacity: {router}")
            found[router] = average_metrics(future.result() for _, future in cells[load, router])
        bound = sum(bounds[load]) / len(bounds[load])
        for line in _rows(name, reuse, load, found, cap_of, bound):
            rows.append(line | {"seeds": list(size.seeds), "seconds": cells[load, MOTLEY][0][0].seconds})
    return rows


def _tune_caps(
    plan: RoutingBenchPlan, base: RoutingRun, pool: ProcessPoolExecutor, tuned: Tuned, progress: Progress
) -> dict[str, RequestCap | None]:
    """Return for each baseline the limit of requests per replica with which it does best."""
    smaller = _SMALLER.get(base.fleet)
    size = replace(plan.size_of(base.fleet), requests=600)
    if smaller:
        size = replace(size, seconds=(20.0, 60.0))
    base = replace(base, fleet=smaller or base.fleet)
    kind_of = (base.fleet, base.reuse, replace(size, loads=TUNED_AT, seeds=()))
    if kind_of in tuned:
        return tuned[kind_of]
    max_load = _capacity(base)
    trials = {
        (router, cap): [
            pool.submit(_measure, _size_run(size, replace(base, router=router, cap=cap),
            load * max_load)) for load in TUNED_AT
        ]
        for router, baseline in BASELINES.items() for cap in baseline.caps
    }  # fmt: skip
    best: dict[str, RequestCap | None] = {}
    for router, baseline in BASELINES.items():
        progress(f"{base.fleet}, {base.reuse} reuse: tuning {router}")
        good = {cap: sum(future.result().goodput for future in trials[router, cap]) for cap in baseline.caps}
        best[router] = max(good, key=lambda cap: good[cap])
    tuned[kind_of] = best
    return best


def _size_run(size: SimulationSize, one: RoutingRun, rate: float) -> RoutingRun:
    counted = min(max(size.requests / rate, size.seconds[0]), size.seconds[1])
    return replace(one, rate=rate, seconds=size.warm_up_s + counted)


def _capacity(one: RoutingRun) -> float:
    sample = replace(one, rate=20.0, seconds=400.0)
    return capacity(one.replicas(), length_buckets(sample.traffic(), sample.seconds), one.slo)


def _optimum_bound(one: RoutingRun) -> float:
    """Return the optimum for the requests of the counted time, which is never more than these."""
    traffic = one.traffic()
    counted = [each for each in traffic if each.at_s >= one.warm_up_s]
    warm_prefixes = frozenset(each.prefix[0] for each in traffic if each.at_s < one.warm_up_s)
    return optimum(one.replicas(), length_buckets(counted, one.seconds - one.warm_up_s, warm_prefixes), one.slo)


def _measure(one: RoutingRun) -> SimulationMetrics:
    replicas, traffic = one.replicas(), one.traffic(AFTER_S)
    if one.router == TRUE_SPEEDS:  # knows true speeds and present loads, and all requests come through one ingress
        replicas_with_truth = [replace(each, published=each.true) for each in replicas]
        outcome = simulate(
            replicas, traffic, [_router(one, replicas_with_truth, 0)], one.seed, heard_s=0.0, until_s=one.seconds
        )
    else:
        routers = [_router(one, replicas, number) for number in range(INGRESSES)]
        outcome = simulate(replicas, traffic, routers, one.seed, until_s=one.seconds)
    return measure_outcome(outcome, one.slo, one.warm_up_s, one.seconds)


def _router(one: RoutingRun, replicas: Sequence[SimulatedReplica], number: int) -> SimulatedRouter:
    seed = 1000 * one.seed + number
    if one.router in BASELINES:
        return BaselineRouter(replicas, one.slo, seed, BASELINES[one.router].policy, one.cap)
    return MotleyRouter(replicas, one.slo, seed, prefixes=one.router != WITHOUT)


def _rows(
    name: str,
    reuse: str,
    load: float,
    found: dict[str, SimulationMetrics],
    cap_of: dict[str, RequestCap | None],
    bound: float,
) -> Iterator[dict[str, Any]]:
    ours = found[MOTLEY]
    workload = {"fleet": name, "reuse": reuse, "load": load}
    for router, theirs in found.items():
        if router == MOTLEY:
            line = row("goodput", workload, "requests/s", [ours.goodput], peer="optimum", peer_samples=[bound])
        else:
            line = row("goodput", workload, "requests/s", [ours.goodput], peer=router, peer_samples=[theirs.goodput])
        cap = cap_of.get(router)
        limit = {"most_in_flight": None if cap is None else str(cap)} if router in cap_of else {}
        yield line | {"source": "simulated", "bound": bound, **limit, "details": theirs.to_json()}


def text(report: dict[str, Any]) -> str:
    """Return the report as text: for each fleet, reuse and load the share of the bound that each router reached."""
    cells: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    lines = []
    for each in report["rows"]:
        if each["metric"] == "goodput":
            workload = each["workload"]
            cells.setdefault((workload["fleet"], workload["reuse"], workload["load"]), []).append(each)
        elif each["metric"] == "recording":
            lines.append(
                f"record of one among {each['workload']['replicas']} replicas: {each['value']:.1f} µs (measured)"
            )
        else:
            what = "decision among {replicas} replicas, prompt of {prompt_tokens} tokens".format(**each["workload"])
            lines.append(f"{what}: {each['value']:.0f} µs (measured)")
    found = []
    for (name, reuse, load), rows in cells.items():
        shares = ", ".join(f"{_name(each)} {each['details']['goodput'] / each['bound']:.3f}" for each in rows)
        found.append(f"{name}, {reuse} reuse, {load:.0%}: of {rows[0]['bound']:.1f} good requests/s: {shares}")
    return "\n".join(["simulated, in virtual time:", *found, *lines])


def _name(line: dict[str, Any]) -> str:
    return MOTLEY if line["peer"] == "optimum" else str(line["peer"])
