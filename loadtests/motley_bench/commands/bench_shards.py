"""Command `motley bench shards`."""

from __future__ import annotations

from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_options import BenchOut
from .bench_output import print_report, refused


def shards(
    model: Annotated[
        list[str] | None,
        typer.Option(help="demo, or a shape such as qwen2-0.5b; may be repeated; default: these two."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Sequences; may be repeated; default: 1 and 8.", min=1)
    ] = None,
    turns: Annotated[int, typer.Option(help="Turns of each way.", min=1)] = 5,
    steps: Annotated[int, typer.Option(help="Tokens of each sequence in a turn.", min=1)] = 8,
    context: Annotated[int, typer.Option(help="Tokens in KV before decode.", min=1)] = 64,
    threads: options.Threads = None,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Compare decode on a CPU by one process, by two ranks and by two stages, in turns and with as many threads in all.

    It also shows how long the sums over ranks take: their share of a step, and by themselves. A divided model is for
    memory that one process does not have; on one CPU, whose threads share its memory's bandwidth, it is seldom faster.

    \b
    Examples:
      motley bench shards
      motley bench shards --model demo --batch 8 --turns 3 --json
      motley bench shards --out loadtests/results/shards-cpu.json
    """
    from ..engine import parallel_decode as bench
    from ..reporting.report_table import table

    with refused(), show_activity("starting") as progress:
        report = bench.run(
            models=model or bench.MODELS,
            batches=batch or (1, 8),
            turns=turns,
            steps=steps,
            context=context,
            threads=threads,
            progress=progress,
        )
    print_report(report, table, out, as_json=as_json)
