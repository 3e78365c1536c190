"""Command `motley bench prefix`."""

from __future__ import annotations

from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_options import BenchOut
from .bench_output import tell


def prefix(
    repeats: Annotated[int, typer.Option(help="Turns of each way.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model, one size of values, less of it.")] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(help="values, ttft, trace, faults, numerics or simulated; may be repeated; default: all."),
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
      motley bench prefix --out loadtests/results/prefix-cpu.json
    """
    from ..prefix import prefix_benchmark
    from ..reporting.report_table import table

    parts = tuple(part or prefix_benchmark.PARTS)
    if unknown := [name for name in parts if name not in prefix_benchmark.PARTS]:
        raise typer.BadParameter(f"--part {unknown[0]}: expected {', '.join(prefix_benchmark.PARTS)}")
    plan = prefix_benchmark.quick(parts) if quick else prefix_benchmark.PrefixBenchPlan(parts=parts, repeats=repeats)
    with show_activity("starting") as say:
        report = prefix_benchmark.run(plan, say)
    tell(report, table, out, as_json=as_json)
