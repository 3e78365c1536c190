"""Command `motley bench routing`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_output import print_report


def routing(
    fleet: Annotated[
        list[str] | None,
        typer.Option(
            help="equal, mixed, classes, thousand, or such as P40+2*T4; may be repeated; default: these four."
        ),
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(
            help="Load as a share of the fleet's capacity; may be repeated; default: 0.5 to 1.1.",
            min=0.01,
            max=10.0,
        ),
    ] = None,
    reuse: Annotated[
        list[str] | None, typer.Option(help="Reuse of prompts' beginnings: low, high; default: both.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests of one run; default: 1200, for large fleets some seconds' worth.", min=1),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Runs at a time; default: as many as there are cores.", min=1)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the file's other fleets, to measure it in parts.")] = False,
    model: Annotated[str, typer.Option(help="int4 weights of qwen2.5-0.5b, qwen2.5-7b or llama-3-8b.")] = "qwen2.5-7b",
    quick: Annotated[bool, typer.Option("--quick", help="One mixed fleet, one load, a short run.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON object there, and a chart beside it.")
    ] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Compare routers on simulated fleets: Motley's and others' under the same requests, beside the optimum.

    It runs in virtual time, on replicas that compute nothing and take the time that the roofline predicts, each off its
    profile by up to 30%, which no router knows. Only the time of a routing decision is measured. The whole run takes
    over an hour on one core; the figures are the same on any machine.

    \b
    Examples:
      motley bench routing --quick
      motley bench routing --fleet P40+T4+A10 --load 0.9 --reuse low
      motley bench routing --out loadtests/results/routing.json
      motley bench routing --fleet equal --reuse high --keep --out loadtests/results/routing.json
    """
    from dataclasses import replace

    from ..routing import router_comparison, routing_plan
    from ..routing.routing_chart import routing_svg

    plan = routing_plan.RoutingBenchPlan(requests=requests, model=model, loads=load, processes=processes)
    if quick:
        size = routing_plan.SimulationSize(loads=(0.9,), seeds=(11,), requests=1200)
        plan = replace(plan, fleets=("mixed",), reuse=("low",), size=size)
    for each in reuse or ():
        if each not in routing_plan.REUSE:
            raise typer.BadParameter(f"--reuse {each}: expected low or high")
    plan = replace(plan, fleets=fleet or plan.fleets, reuse=reuse or plan.reuse)
    with show_activity("starting") as say:
        report = router_comparison.run(plan, say)
    if keep and out is not None and out.exists():
        report = router_comparison.merge_reports(report, json.loads(out.read_text()))
    if out is not None:
        out.with_suffix(".svg").write_text(routing_svg(report))
    print_report(report, router_comparison.text, out, as_json=as_json)
