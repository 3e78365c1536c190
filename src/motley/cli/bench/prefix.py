"""Command `motley bench prefix`."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import options
from ..config import ConfigFile
from ..progress import show_activity
from .told import tell


def prefix(
    repeats: Annotated[int, typer.Option(help="Turns of each way.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model, one size of values, less of it.")] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(help="values, ttft, trace, faults, numerics or simulated; may be repeated; default: all."),
    ] = None,
    out: options.BenchOut = None,
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
    from ...cluster.prefix import bench
    from ...replicas.bench.report import table

    parts = tuple(part or bench.PARTS)
    if unknown := [name for name in parts if name not in bench.PARTS]:
        raise typer.BadParameter(f"--part {unknown[0]}: expected {', '.join(bench.PARTS)}")
    plan = bench.quick(parts) if quick else bench.PrefixBenchPlan(parts=parts, repeats=repeats)
    with show_activity("starting") as say:
        report = bench.run(plan, say)
    tell(report, table, out, as_json=as_json)
