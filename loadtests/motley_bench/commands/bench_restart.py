"""Command `motley bench restart`."""

from __future__ import annotations

from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_options import BenchOut, DiskFolder, DiskFormats, DiskShape
from .bench_output import print_report, refused


def restart(
    shape: DiskShape = "qwen2-0.5b",
    format: DiskFormats = None,
    turns: Annotated[int, typer.Option(help="Turns of each start, cold and warm.", min=1)] = 3,
    threads: options.Threads = None,
    folder: DiskFolder = None,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure the time from the kill of a service's replica to the next answer: starts `motley serve` and kills
    processes.

    A first start finds no kept files of an earlier one, a second one finds repacked weights and rates; either is in a
    new process or in one that has waited for it.

    \b
    Examples:
      motley bench restart --shape tiny --turns 1
      motley bench restart --format gptq-int4 --out loadtests/results/restart-cpu-int4.json
    """
    from ..reporting.report_table import table
    from ..starts import replica_restarts as bench

    with refused(), show_activity("starting") as progress:
        formats = tuple(format or bench.FORMATS)
        report = bench.run(shape=shape, formats=formats, turns=turns, threads=threads, folder=folder, progress=progress)
    print_report(report, table, out, as_json=as_json)
