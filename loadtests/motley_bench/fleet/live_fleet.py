"""Benchmark `motley bench fleet`: one load on a live fleet, routed in turn by Motley and by power of two choices.

The service, its transport and its clients are real; simulated pools take the time that the roofline predicts for their
GPUs. So the figures are about routing on such a fleet, and are called simulated.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from motley.cluster.fleet.deployed.running_services import RunningService, find_running_service
from motley.cluster.fleet.spec.fleet_file_loader import load_fleet
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.ray_compat.visible_names import replica_title
from motley.cluster.routing.ingress_broadcast import APPLICATION, call_every_ingress, set_ingress_pools
from motley.cluster.routing.policy.routing_policies import DEFAULT_POLICY
from motley.cluster.service.deployment.routing_settings import fleet_routing_config
from motley.cluster.service.startup.join_cluster import join_cluster
from motley.replicas.errors import InvalidRequest, Unavailable
from motley.replicas.host.measurement_rows import machine, quantile, row, versions

from ..load import load_clients
from ..load.load_report import client_report
from ..load.measured_service import MeasuredService, inspect_service, start_service
from ..load.request_samples import OK, BenchSlo, LoadOutcome, RequestSample, count_codes, samples_in_window
from .core_usage import CoreUsage
from .fleet_plan import FleetBenchPlan, turn_workload, written_fleet

Progress = Callable[[str], None]
Row = dict[str, Any]

MOTLEY, TWO_CHOICES = "motley", "two choices"
POLICIES = {MOTLEY: DEFAULT_POLICY, TWO_CHOICES: "two_choices"}
SETTLE_S = 1.0  # pause after a turn, by which replicas have reported their loads


@dataclass(frozen=True, slots=True)
class _PlacementTurn:
    """Results of one side in one turn.

    prompt_tokens  prompt tokens that each pool computed
    cores          cores used on average, by group of processes
    """

    outcome: LoadOutcome
    prompt_tokens: dict[str, int]
    cores: dict[str, float]


def run(plan: FleetBenchPlan, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Run `motley bench fleet` and return its report. Raises InvalidRequest, Unavailable, ConfigurationError and
    EngineFault.
    """
    before = machine()
    with written_fleet(plan) as path:
        spec = load_fleet(path).spec
        if spec.slo is None:
            raise InvalidRequest("--fleet: the file has no `slo`, by which requests are judged", param="fleet")
        progress("starting the fleet")
        with start_service([str(path)]) as endpoints:
            service = inspect_service("grpc", endpoints["grpc"])
            with _joined_cluster(endpoints):
                sides = asyncio.run(_sides(plan, spec, service, int(endpoints["pid"]), progress))
    slo = BenchSlo(spec.slo.ttft_ms / 1e3, spec.slo.tpot_ms / 1e3)
    return {
        "bench": "fleet",
        "machine": before,
        "versions": versions("motley", "ray", "grpcio", "numpy"),
        "settings": {
            "pools": {pool.name: pool.simulate or pool.where for pool in spec.pools},
            "ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "share": plan.share, "turns": plan.turns,
            **turn_workload(plan, 0).to_json(),
        },
        "rows": list(_rows(plan, slo, sides)),
        "sides": {name: [_turn_report(plan, slo, number, turn) for number, turn in enumerate(turns)]
                  for name, turns in sides.items()},
    }  # fmt: skip


@contextmanager
def _joined_cluster(endpoints: dict[str, str]) -> Iterator[None]:
    ports = [int(endpoints[name].rpartition(":")[2]) for name in ("http", "grpc")]
    running: RunningService | None = find_running_service(*ports)
    if running is None:
        raise Unavailable("the fleet that was started no longer runs")
    with join_cluster(running.address, running.environment):
        yield


async def _sides(
    plan: FleetBenchPlan, spec: FleetSpec, service: MeasuredService, pid: int, progress: Progress
) -> dict[str, list[_PlacementTurn]]:
    """Run all turns and return them by side.

    The side that is second in a turn is first in the next. All run in one event loop, since Serve's handles are bound
    to theirs.
    """
    found: dict[str, list[_PlacementTurn]] = {MOTLEY: [], TWO_CHOICES: []}
    for turn in range(plan.turns):
        for name in (MOTLEY, TWO_CHOICES) if turn % 2 == 0 else (TWO_CHOICES, MOTLEY):
            progress(f"turn {turn + 1} of {plan.turns}: {name}")
            found[name].append(await _turn(plan, spec, service, pid, name, turn))
    return found


async def _turn(
    plan: FleetBenchPlan, spec: FleetSpec, service: MeasuredService, pid: int, name: str, turn: int
) -> _PlacementTurn:
    routing = replace(fleet_routing_config(spec), policy=POLICIES[name])
    await set_ingress_pools([pool.name for pool in spec.pools], routing)
    before, cores = await _prompt_tokens_by_pool(), CoreUsage(pid, _part)
    outcome = await asyncio.to_thread(load_clients.run_clients, turn_workload(plan, turn), service, plan.clients)
    used = cores.used()
    await asyncio.sleep(SETTLE_S)
    after = await _prompt_tokens_by_pool()
    return _PlacementTurn(outcome, {pool.name: after[pool.name] - before[pool.name] for pool in spec.pools}, used)


async def _prompt_tokens_by_pool() -> Counter[str]:
    """Return the number of prompt tokens that each pool has taken so far."""
    from ray import serve

    seen = await call_every_ingress(serve.get_app_handle(APPLICATION), "fleet", timeout_s=30.0)
    found: Counter[str] = Counter()
    for one in seen[0].replicas:
        found[one.pool] += one.load.prompt_tokens
    return found


def _part(command: str) -> str:
    title = replica_title(APPLICATION)
    if title in command:
        return command.partition(title)[2].split()[0].partition(".")[0]
    return "Ray and HAProxy"


def _rows(plan: FleetBenchPlan, slo: BenchSlo, sides: dict[str, list[_PlacementTurn]]) -> Iterator[Row]:
    """Yield the report's rows of goodput, TTFT and TPOT of both routers; a row has a sample for each turn."""
    what = {"rate": plan.rate, "prompt": str(plan.prompt_tokens), "output": str(plan.output_tokens)}

    def of(metric: str, unit: str, figure: Callable[[Sequence[RequestSample]], float], *, higher: bool = False) -> Row:
        ours, theirs = (
            [figure(_samples_in_window(plan, turn.outcome)) for turn in sides[name]] for name in (MOTLEY, TWO_CHOICES)
        )
        return row(metric, what, unit, ours, peer=TWO_CHOICES, peer_samples=theirs, higher_is_better=higher) | {
            "source": "simulated"
        }

    yield of("goodput", "requests/s", lambda window: sum(map(slo.met_by, window)) / plan.seconds, higher=True)
    yield of("in time", "%", lambda window: 100 * _share_in_time(slo, window), higher=True)
    for name in ("ttft", "tpot"):
        for share in (0.5, 0.95, 0.99):
            yield of(f"{name} p{share * 100:g}", "ms", lambda window, n=name, s=share: _tail(window, n, s))  # type: ignore[misc]


def _samples_in_window(plan: FleetBenchPlan, outcome: LoadOutcome) -> list[RequestSample]:
    return samples_in_window(outcome.samples, plan.warmup_s, plan.warmup_s + plan.seconds)


def _share_in_time(slo: BenchSlo, window: Sequence[RequestSample]) -> float:
    return sum(map(slo.met_by, window)) / max(1, len(window))


def _tail(window: Sequence[RequestSample], name: str, share: float) -> float:
    """Return a quantile of TTFT or TPOT in milliseconds, over the requests that were answered."""
    values = [getattr(sample, f"{name}_s") for sample in window if sample.code == OK]
    return 1e3 * quantile([value for value in values if value is not None] or [0.0], share)


def _turn_report(plan: FleetBenchPlan, slo: BenchSlo, number: int, turn: _PlacementTurn) -> dict[str, Any]:
    window = _samples_in_window(plan, turn.outcome)
    tokens = sum(turn.prompt_tokens.values())
    return {
        "requests": len(window),
        "in_time": round(_share_in_time(slo, window), 4),
        "met": _share_in_time(slo, window) >= plan.share,
        "ended": count_codes(window),
        "prompt_tokens_by_pool": {pool: round(count / max(1, tokens), 4) for pool, count in turn.prompt_tokens.items()},
        "cores": turn.cores,
        "client": client_report(turn_workload(plan, number), turn.outcome),
    }


def text(report: dict[str, Any]) -> str:
    """Return the report as text: a line for each side and turn, and one for each figure."""
    settings, lines = report["settings"], []
    head = f"{settings['rate']:g} requests/s on {', '.join(settings['pools'])}; simulated, in real time"
    goal = f"TTFT {settings['ttft_s']:g} s and TPOT {settings['tpot_s']:g} s for {settings['share']:.0%}"
    for name, turns in report["sides"].items():
        for turn in turns:
            shares = ", ".join(f"{pool} {share:.0%}" for pool, share in turn["prompt_tokens_by_pool"].items())
            verdict = "met" if turn["met"] else "MISSED"
            idle = turn["cores"].get("idle")
            lines.append(f"  {name:<12}{goal}: {verdict}, {turn['in_time']:.1%} of {turn['requests']}; {shares}"
                         + ("" if idle is None else f"; {idle:.2f} cores idle"))  # fmt: skip
            if turn["client"]["limited"]:
                lines.append(f"  LIMITED BY THE CLIENT: {turn['client']['why']}")
    figures = [
        f"  {each['metric']:<12}{each['value']:>10,.1f} {each['unit']:<11}{TWO_CHOICES} {each['peer_value']:>10,.1f}"
        for each in report["rows"]
    ]
    return "\n".join([head, *lines, *figures])
