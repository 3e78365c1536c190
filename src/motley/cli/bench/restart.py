"""Command `motley bench restart`."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import options
from ..config import ConfigFile
from ..progress import show_activity
from .told import refused, tell


def restart(
    shape: options.DiskShape = "qwen2-0.5b",
    format: options.DiskFormats = None,
    turns: Annotated[int, typer.Option(help="Turns of each start, cold and warm.", min=1)] = 3,
    threads: options.Threads = None,
    folder: options.DiskFolder = None,
    out: options.BenchOut = None,
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
    from ...cluster.bench import restart as bench
    from ...replicas.bench.report import table

    with refused(), show_activity("starting") as progress:
        formats = tuple(format or bench.FORMATS)
        report = bench.run(shape=shape, formats=formats, turns=turns, threads=threads, folder=folder, progress=progress)
    tell(report, table, out, as_json=as_json)
