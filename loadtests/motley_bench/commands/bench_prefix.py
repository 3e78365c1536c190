"""Command `motley bench prefix`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_options import BenchOut
from .bench_output import print_report


def prefix(
    repeats: Annotated[int, typer.Option(help="Turns of each way.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model, one size of values, less of it.")] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(help="values, ttft, trace, faults, numerics or simulated; may be repeated; default: all."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Model of the part numerics: a folder, or a Hugging Face id.")
    ] = "demo",
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Held-out text for --model; demo has its own.", exists=True, dir_okay=False),
    ] = None,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure what prefixes shared through a Redis on this machine cost, and what they save.

    It measures values written to Redis and read from it, beside redis-py, valkey-glide, redis-benchmark and a memcpy;
    the time to the first token of a replica that computes a prefix, has it, or finds it in Redis; tenants with a prompt
    each, on two replicas with Redis and without; a replica under load whose Redis is killed, stopped, emptied, full,
    late, locked or cut off; and what a model answers with KV that was computed or stored in another dtype. It starts a
    redis-server of its own. Figures of GPUs are simulated, at the rate measured here.

    \b
    Examples:
      motley bench prefix --quick
      motley bench prefix --quick --part faults
      motley bench prefix --part numerics --model ./out/smollm2-135m-int4 --text out/held-out.txt
      motley bench prefix --out loadtests/results/prefix-cpu.json
    """
    from motley.replicas.model.checkpoint_inspection import resolve_model

    from ..prefix import prefix_benchmark
    from ..reporting.report_table import table

    parts = tuple(part or prefix_benchmark.PARTS)
    if unknown := [name for name in parts if name not in prefix_benchmark.PARTS]:
        raise typer.BadParameter(f"--part {unknown[0]}: expected {', '.join(prefix_benchmark.PARTS)}")
    if (model == "demo") != (text is None):
        raise typer.BadParameter("--model and --text are given together: the demo model has a text of its own")
    if text is not None and "numerics" not in parts:
        raise typer.BadParameter("--model and --text are of the part numerics, which --part leaves out")
    plan = prefix_benchmark.quick(parts) if quick else prefix_benchmark.PrefixBenchPlan(parts=parts, repeats=repeats)
    if text is not None:
        folder = resolve_model(options.find_model(model))
        plan = replace(plan, numerics=replace(plan.numerics, folder=folder, text=text))
    with show_activity("starting") as say:
        report = prefix_benchmark.run(plan, say)
    print_report(report, table, out, as_json=as_json)
