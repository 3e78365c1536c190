"""Command `motley bench service`."""

from __future__ import annotations

from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_options import BenchOut
from .bench_output import print_report


def service(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Shape with random weights, or demo; may be repeated; default: qwen2-0.5b and demo."),
    ] = None,
    turns: Annotated[int, typer.Option(help="Turns of each side.", min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds that a turn is measured.", min=1.0)] = 10.0,
    clients: Annotated[int, typer.Option(help="Processes that make the load.", min=1)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller shape, one short turn each.")] = False,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure what the service itself costs, in messages, requests and milliseconds: starts all that it needs.

    It runs first with the null engine, which computes nothing: streams and whole answers through HAProxy, ingress and
    pool, beside the same worker without a service and beside a plain gRPC server. Then it runs real engines with the
    service and without.

    \b
    Examples:
      motley bench service --quick
      motley bench service --out loadtests/results/serve-cpu.json
      motley bench service --model qwen2-0.5b --turns 5 --json
    """
    from ..service import service_cost as bench

    plan = bench.ServiceBenchPlan(turns=turns, seconds=seconds, clients=clients, models=model or bench.MODELS)
    if quick:
        plan = bench.ServiceBenchPlan(turns=1, seconds=2.0, clients=clients, models=model or ("tiny",))
    try:
        with show_activity("starting") as progress:
            report = bench.run(plan, progress)
    except ValueError as error:
        raise typer.BadParameter(f"--model: {error}") from error
    print_report(report, bench.text, out, as_json=as_json)
