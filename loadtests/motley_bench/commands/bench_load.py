"""Command `motley bench load`."""

from __future__ import annotations

from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_options import BenchOut, DiskFolder, DiskFormats, DiskShape
from .bench_output import print_report, refused


def load(
    shape: DiskShape = "qwen2-0.5b",
    format: DiskFormats = None,
    turns: Annotated[int, typer.Option(help="Turns of each side, cold and warm.", min=1)] = 3,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    folder: DiskFolder = None,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure the time from a process's start to its first token, with the page cache cold and warm, beside
    transformers.

    It also measures how fast a checkpoint's bytes are read, beside one plain reader and safetensors' load_file. The
    second start finds the weights that the first one has repacked.

    \b
    Examples:
      motley bench load --shape tiny --turns 1
      motley bench load --format bf16 --folder /var/tmp --out load.json
    """
    from ..reporting.report_table import table
    from ..starts import start_to_token as bench

    with refused(), show_activity("starting") as progress:
        formats = tuple(format or bench.FORMATS)
        report = bench.run(
            shape=shape, formats=formats, turns=turns, threads=threads, device=device, folder=folder, progress=progress
        )
    print_report(report, table, out, as_json=as_json)
