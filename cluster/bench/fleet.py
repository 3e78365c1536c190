"""Benchmark `motley bench fleet`: one load on a live fleet, routed in turn by Motley and by power of two choices.

The service, its transport and its clients are real; simulated pools take the time that the roofline predicts for their
GPUs. So the figures are about routing on such a fleet, and are called simulated.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...replicas.bench.report import machine, quantile, row, versions
from ...replicas.errors import InvalidRequest, Unavailable
from ..fleet.file import load_fleet
from ..fleet.running import Running, find_running
from ..fleet.spec import FleetSpec
from ..join import joined
from ..objectives import routing_of
from . import clients
from .cores import Cores
from .lengths import Lengths
from .report import client
from .samples import OK, Outcome, Sample, Slo, codes, in_window
from .service import Service, inspect, started
from .two_choices import two_choices
from .workload import Workload

Progress = Callable[[str], None]
Row = dict[str, Any]

MOTLEY, TWO = "motley", "two choices"
SETTLE_S = 1.0  # pause after a turn, by which replicas have reported their loads
# Four GPUs of unequal speed, and this CPU; the seeds decide how far the GPUs are off their profiles.
FLEET: dict[str, Any] = {
    "model": "demo",
    "slo": {"ttft_ms": 1500, "tpot_ms": 150},
    "pools": [
        *(
            {"name": gpu.lower(), "simulate": gpu, "simulate_model": "qwen2.5-7b", "hidden": {"seed": seed}}
            for seed, gpu in enumerate(("P40", "T4", "L4", "A10"))
        ),
        # Short prompts only: cores that compute are missing for the service and its clients.
        {"name": "cpu", "engine": {"threads": 1, "kv_memory": "128MiB", "max_running": 2, "max_model_len": 768}},
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of `motley bench fleet`. In each turn both sides get the same requests at the same times.

    fleet  fleet file, which must have objectives; None: FLEET
    rate   requests per second, arriving as a Poisson process
    share  share of the requests that must meet the objectives for a turn to be met
    """

    fleet: Path | None = None
    rate: float = 6.0
    prompt_tokens: Lengths = Lengths("uniform", 200, 1800)  # noqa: RUF009  frozen
    output_tokens: Lengths = Lengths("uniform", 20, 80)  # noqa: RUF009  frozen
    turns: int = 2
    seconds: float = 40.0
    warmup_s: float = 10.0
    clients: int = 1
    seed: int = 21
    share: float = 0.95


@dataclass(frozen=True, slots=True)
class _Turn:
    """Results of one side in one turn.

    prompt_tokens  prompt tokens that each pool computed
    cores          cores used on average, by group of processes
    """

    outcome: Outcome
    prompt_tokens: dict[str, int]
    cores: dict[str, float]


def run(plan: Plan, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Run `motley bench fleet` and return its report. Raises InvalidRequest, Unavailable, ConfigurationError and
    EngineFault.
    """
    before = machine()
    with _fleet_file(plan) as path:
        spec = load_fleet(path).spec
        if spec.slo is None:
            raise InvalidRequest("--fleet: the file has no `slo`, by which requests are judged", param="fleet")
        progress("starting the fleet")
        with started([str(path)]) as endpoints:
            service = inspect("grpc", endpoints["grpc"])
            with _joined(endpoints):
                sides = asyncio.run(_sides(plan, spec, service, int(endpoints["pid"]), progress))
    slo = Slo(spec.slo.ttft_ms / 1e3, spec.slo.tpot_ms / 1e3)
    return {
        "bench": "fleet",
        "machine": before,
        "versions": versions("motley", "ray", "grpcio", "numpy"),
        "settings": {
            "pools": {pool.name: pool.simulate or pool.where for pool in spec.pools},
            "ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "share": plan.share, "turns": plan.turns,
            **_workload(plan, 0).to_json(),
        },
        "rows": list(_rows(plan, slo, sides)),
        "sides": {name: [_told(plan, slo, number, turn) for number, turn in enumerate(turns)]
                  for name, turns in sides.items()},
    }  # fmt: skip


@contextmanager
def _fleet_file(plan: Plan) -> Iterator[Path]:
    if plan.fleet is not None:
        yield plan.fleet
        return
    with tempfile.TemporaryDirectory(prefix="motley-bench-") as folder:
        path = Path(folder, "fleet.yaml")
        path.write_text(json.dumps(FLEET))  # JSON is YAML too
        yield path


@contextmanager
def _joined(endpoints: dict[str, str]) -> Iterator[None]:
    ports = [int(endpoints[name].rpartition(":")[2]) for name in ("http", "grpc")]
    running: Running | None = find_running(*ports)
    if running is None:
        raise Unavailable("the fleet that was started no longer runs")
    with joined(running.address, running.environment):
        yield


async def _sides(plan: Plan, spec: FleetSpec, service: Service, pid: int, progress: Progress) -> dict[str, list[_Turn]]:
    """Run all turns and return them by side.

    The side that is second in a turn is first in the next. All run in one event loop, since Serve's handles are bound
    to theirs.
    """
    found: dict[str, list[_Turn]] = {MOTLEY: [], TWO: []}
    for turn in range(plan.turns):
        for name in (MOTLEY, TWO) if turn % 2 == 0 else (TWO, MOTLEY):
            progress(f"turn {turn + 1} of {plan.turns}: {name}")
            found[name].append(await _turn(plan, spec, service, pid, name, turn))
    return found


async def _turn(plan: Plan, spec: FleetSpec, service: Service, pid: int, name: str, turn: int) -> _Turn:
    from ..every_ingress import use_pools

    routing = replace(routing_of(spec), order=two_choices if name == TWO else None)
    await use_pools([pool.name for pool in spec.pools], routing)
    before, cores = await _computed(), Cores(pid, _part)
    outcome = await asyncio.to_thread(clients.run, _workload(plan, turn), service, plan.clients)
    used = cores.used()
    await asyncio.sleep(SETTLE_S)
    after = await _computed()
    return _Turn(outcome, {pool.name: after[pool.name] - before[pool.name] for pool in spec.pools}, used)


def _workload(plan: Plan, turn: int) -> Workload:
    return Workload(
        rate=plan.rate, prompt_tokens=plan.prompt_tokens, output_tokens=plan.output_tokens, seed=plan.seed + turn,
        warmup_s=plan.warmup_s, duration_s=plan.seconds,
    )  # fmt: skip


async def _computed() -> Counter[str]:
    """Return the number of prompt tokens that each pool has taken so far."""
    from ray import serve

    from ..every_ingress import of_every_ingress
    from ..fleet.store import APPLICATION

    seen = await of_every_ingress(serve.get_app_handle(APPLICATION), "fleet", timeout_s=30.0)
    found: Counter[str] = Counter()
    for one in seen[0].replicas:
        found[one.pool] += one.load.prompt_tokens
    return found


def _part(command: str) -> str:
    if "ServeReplica:motley:" in command:
        return command.partition("ServeReplica:motley:")[2].split()[0].partition(".")[0]
    return "Ray and HAProxy"


def _rows(plan: Plan, slo: Slo, sides: dict[str, list[_Turn]]) -> Iterator[Row]:
    """Yield the report's rows of goodput, TTFT and TPOT of both routers; a row has a sample for each turn."""
    what = {"rate": plan.rate, "prompt": str(plan.prompt_tokens), "output": str(plan.output_tokens)}

    def of(metric: str, unit: str, figure: Callable[[Sequence[Sample]], float], *, higher: bool = False) -> Row:
        ours, theirs = ([figure(_counted(plan, turn.outcome)) for turn in sides[name]] for name in (MOTLEY, TWO))
        return row(metric, what, unit, ours, peer=TWO, peer_samples=theirs, higher_is_better=higher) | {
            "source": "simulated"
        }

    yield of("goodput", "requests/s", lambda window: sum(map(slo.met_by, window)) / plan.seconds, higher=True)
    yield of("in time", "%", lambda window: 100 * _in_time(slo, window), higher=True)
    for name in ("ttft", "tpot"):
        for share in (0.5, 0.95, 0.99):
            yield of(f"{name} p{share * 100:g}", "ms", lambda window, n=name, s=share: _tail(window, n, s))  # type: ignore[misc]


def _counted(plan: Plan, outcome: Outcome) -> list[Sample]:
    return in_window(outcome.samples, plan.warmup_s, plan.warmup_s + plan.seconds)


def _in_time(slo: Slo, window: Sequence[Sample]) -> float:
    return sum(map(slo.met_by, window)) / max(1, len(window))


def _tail(window: Sequence[Sample], name: str, share: float) -> float:
    """Return a quantile of TTFT or TPOT in milliseconds, over the requests that were answered."""
    values = [getattr(sample, f"{name}_s") for sample in window if sample.code == OK]
    return 1e3 * quantile([value for value in values if value is not None] or [0.0], share)


def _told(plan: Plan, slo: Slo, number: int, turn: _Turn) -> dict[str, Any]:
    window = _counted(plan, turn.outcome)
    tokens = sum(turn.prompt_tokens.values())
    return {
        "requests": len(window),
        "in_time": round(_in_time(slo, window), 4),
        "met": _in_time(slo, window) >= plan.share,
        "ended": codes(window),
        "prompt_tokens_by_pool": {pool: round(count / max(1, tokens), 4) for pool, count in turn.prompt_tokens.items()},
        "cores": turn.cores,
        "client": client(_workload(plan, number), turn.outcome),
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
        f"  {each['metric']:<12}{each['value']:>10,.1f} {each['unit']:<11}{TWO} {each['peer_value']:>10,.1f}"
        for each in report["rows"]
    ]
    return "\n".join([head, *lines, *figures])
