"""Benchmark `motley bench service`: what the service itself costs, beside the bare worker and beside plain gRPC.

It uses the null engine, which computes nothing, and then real engines. The sides take turns, since the load of the
machine changes; the figures of a turn are samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from motley.cluster.simulation.length_distribution import LengthDistribution
from motley.replicas.demo import demo_path
from motley.replicas.host.measurement_rows import machine, row, versions

from ..checkpoints.random_checkpoint import SHAPES
from ..checkpoints.served_checkpoint import random_checkpoint
from ..load import load_clients, load_report
from ..load.load_report import Row
from ..load.load_workload import Workload
from ..load.measured_service import MeasuredService, inspect_service, start_service
from ..load.request_samples import LoadOutcome
from ..processes.bench_child import BenchChild
from .bare_worker import KV_BYTES, BareWorkerProcess
from .service_metrics import ComparedMetric, e2es, gaps, merge_outcomes, messages, output, requests, ttfts

Progress = Callable[[str], None]
Turn = Callable[[Workload], LoadOutcome]

NULL_STREAMS, UNARY = 16, 32
REAL_STREAMS = 8
# Output tokens. Streams that end together are replaced one by one, and meanwhile an engine without a device to wait for
# makes small steps: with SHORT outputs half of all steps had fewer than 6 of the 16 streams. LONG outputs avoid that.
LONG, SHORT = 1536, 256
DEMO = "demo"
PLAIN = "motley_bench.service.plain_grpc_server"
MODELS = ("qwen2-0.5b", DEMO)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceBenchPlan:
    """Settings of `motley bench service`.

    models    shapes with random weights, or "demo"
    turns     number of turns of each side
    seconds   length of one turn's window
    warmup_s  time before each window; three times as long with a real engine
    """

    models: Sequence[str] = MODELS
    turns: int = 3
    seconds: float = 10.0
    warmup_s: float = 1.0
    clients: int = 1


def run(plan: ServiceBenchPlan, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Run `motley bench service` and return its report.

    Raises ValueError for an unknown shape, Unavailable or EngineFault when something breaks.
    """
    for model in plan.models:
        if model != DEMO and model not in SHAPES:
            raise ValueError(f"{model!r} is not known; expected {' or '.join((DEMO, *SHAPES))}")
    before = machine()
    rows: list[Row] = []
    limits: list[dict[str, Any]] = []
    proxies: set[str] = set()
    for part in (_measure_null_engine, *(_real_engine_measurement(model) for model in plan.models)):
        found = part(plan, progress)
        rows += found.rows
        limits += found.clients
        proxies.add(found.proxy)
    after = {"load_average_1min_after": round(os.getloadavg()[0], 2)}
    return {
        "bench": "service",
        "machine": before | after,
        "versions": versions(*load_report.PACKAGES),
        "through": [*sorted(proxies), "ingress", "pool"],
        "settings": {
            "models": list(plan.models),
            "turns": plan.turns,
            "seconds": plan.seconds,
            "clients": plan.clients,
        },
        "clients": limits,
        "rows": rows,
    }


@dataclass(slots=True)
class _ServiceBenchResult:
    rows: list[Row]
    clients: list[dict[str, Any]]
    proxy: str


def _measure_null_engine(plan: ServiceBenchPlan, progress: Progress) -> _ServiceBenchResult:
    progress("starting the null engine, with the service and without")
    with (
        start_service(["demo", "--null-engine"]) as at,
        BareWorkerProcess(str(demo_path()), null=True) as bare,
        BenchChild(PLAIN) as plain,
    ):
        grpc, http = inspect_service("grpc", at["grpc"]), inspect_service("http", at["http"])
        server = replace(grpc, target=plain.read()["target"])
        bench = _ServiceComparison(plan, progress, at["proxy"], null=True)
        sides: dict[str, Turn] = {
            "service": _turn_over_service(grpc, plan),
            "bare worker": lambda workload: bare.run(workload, grpc.alphabet),
        }
        alone = Workload(concurrency=1, output_tokens=LengthDistribution("fixed", 8))
        bench.compare("unloaded, streams", alone, sides, {"ttft": ttfts})
        plainly = {"plain grpc server": _turn_over_service(server, plan)}
        streamed = {"messages": messages, "itl": gaps}
        for name, tokens in (("streams", LONG), ("short streams", SHORT)):
            many = Workload(concurrency=NULL_STREAMS, output_tokens=LengthDistribution("fixed", tokens))
            bench.compare(f"{NULL_STREAMS} {name}", many, sides | plainly, streamed)
            over_http = replace(many, protocol="http")
            bench.compare(
                f"{NULL_STREAMS} {name} over HTTP", over_http, {"service": _turn_over_service(http, plan)}, streamed
            )
        unary = Workload(streaming=False, output_tokens=LengthDistribution("fixed", 1))
        for concurrency in (1, NULL_STREAMS, UNARY):
            bench.compare(
                f"{concurrency} unary", replace(unary, concurrency=concurrency),
                sides | plainly, {"requests": requests, "e2e": e2es},
            )  # fmt: skip
    return bench.found


def _real_engine_measurement(model: str) -> Callable[[ServiceBenchPlan, Progress], _ServiceBenchResult]:
    def measure(plan: ServiceBenchPlan, progress: Progress) -> _ServiceBenchResult:
        progress(f"starting {model}, with the service and without")
        folder = str(demo_path() if model == DEMO else random_checkpoint(model))
        arguments = [folder, "--served-model-name", model, "--kv-memory", str(KV_BYTES)]
        with start_service(arguments) as at, BareWorkerProcess(folder, null=False) as bare:
            service = inspect_service("grpc", at["grpc"])
            bench = _ServiceComparison(plan, progress, at["proxy"], null=False)
            workload = Workload(concurrency=REAL_STREAMS, output_tokens=LengthDistribution("fixed", 128))
            sides: dict[str, Turn] = {
                "service": _turn_over_service(service, plan),
                "bare worker": lambda request: bare.run(request, service.alphabet),
            }
            bench.compare(f"{model}, {REAL_STREAMS} streams", workload, sides, {"output": output, "itl": gaps})
        return bench.found

    return measure


def _turn_over_service(service: MeasuredService, plan: ServiceBenchPlan) -> Turn:
    return lambda workload: load_clients.run_clients(workload, service, plan.clients)


class _ServiceComparison:
    """Collector of rows about one engine.

    null   the engine behind the service computes nothing
    proxy  name of the proxy in front of the service
    """

    def __init__(self, plan: ServiceBenchPlan, progress: Progress, proxy: str, *, null: bool) -> None:
        self._plan = plan
        self._progress = progress
        self._null = null
        self.found = _ServiceBenchResult([], [], proxy)

    def compare(
        self, name: str, workload: Workload, sides: dict[str, Turn], metrics: dict[str, Callable[..., ComparedMetric]]
    ) -> None:
        """Measure every side in turn under a workload; add a row for each metric and peer, or one row without peers."""
        warmup_s = self._plan.warmup_s * (1 if self._null else 3)
        workload = replace(workload, duration_s=self._plan.seconds, warmup_s=warmup_s)
        seen: dict[str, list[LoadOutcome]] = {side: [] for side in sides}
        for turn in range(self._plan.turns):
            fresh = replace(workload, seed=workload.seed + turn)  # earlier turns' prompts are cached
            for side, take in sides.items():
                self._progress(f"{name}: {side}, turn {turn + 1} of {self._plan.turns}")
                seen[side].append(take(fresh))
        self.found.clients.append(
            {"what": name, **load_report.client_report(workload, merge_outcomes(seen["service"]))}
        )
        for metric, measure in metrics.items():
            self._rows(metric, name, workload, {side: measure(workload, outcomes) for side, outcomes in seen.items()})

    def _rows(self, metric: str, name: str, workload: Workload, found: dict[str, ComparedMetric]) -> None:
        ours = found["service"]
        what = {"what": name, "engine": "null" if self._null else "real", **load_report.describe_workload(workload)}
        peers: list[str | None] = [side for side in found if side != "service"]
        for peer in peers or [None]:
            theirs = None if peer is None else found[peer]
            line = row(
                metric, what, ours.unit, ours.samples, peer=peer,
                peer_samples=None if theirs is None else theirs.samples, higher_is_better=ours.higher_is_better,
            )  # fmt: skip
            if theirs is not None and not ours.higher_is_better:
                line["added"] = line["value"] - line["peer_value"]
                line |= {f"peer_{share}": value for share, value in theirs.tail.items()}
            self.found.rows.append(line | ours.tail)


def text(report: dict[str, Any]) -> str:
    """Return the report as text: for each row its workload, Motley's figure, and the peer beside it."""
    lines = []
    for each in report["rows"]:
        line = f"{each['workload']['what']:<30} {each['metric']:<9}{each['value']:>10,.2f} {each['unit']:<11}"
        tail = [f"{name} {each[name]:,.2f}" for name in ("p90", "p99", "tokens_per_message", "failed") if name in each]
        if each["peer"]:
            tail.append(f"{each['peer']}: {each['peer_value']:,.2f}, ratio {each['ratio']:.2f}")
        if "added" in each:
            tail.append(f"added {each['added']:,.2f} {each['unit']}")
        lines.append(line + "; ".join(tail))
    lines += [f"LIMITED BY THE CLIENT: {each['what']}: {each['why']}" for each in report["clients"] if each["limited"]]
    late = [each["what"] for each in report["clients"] if each["tails_include_client"]]
    lines += [f"the client's own lateness is part of the tails of: {', '.join(late)}"] if late else []
    lines.append(f"through {', '.join(report['through'])}")
    machine_ = report["machine"]
    load = f"{machine_['load_average_1min']} before, {machine_['load_average_1min_after']} after"
    return "\n".join([*lines, f"{machine_['cores']} cores of {machine_['cpu']}, load average {load}"])
