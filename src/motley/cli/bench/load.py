"""Command `motley bench load`."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import options
from ..config import ConfigFile
from ..progress import show_activity
from .told import refused, tell


def load(
    shape: options.DiskShape = "qwen2-0.5b",
    format: options.DiskFormats = None,
    turns: Annotated[int, typer.Option(help="Turns of each side, cold and warm.", min=1)] = 3,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    folder: options.DiskFolder = None,
    out: options.BenchOut = None,
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
    from ...replicas.bench import load as bench
    from ...replicas.bench.report import table

    with refused(), show_activity("starting") as progress:
        formats = tuple(format or bench.FORMATS)
        report = bench.run(
            shape=shape, formats=formats, turns=turns, threads=threads, device=device, folder=folder, progress=progress
        )
    tell(report, table, out, as_json=as_json)
