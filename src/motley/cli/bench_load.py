"""`motley bench load`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .config import ConfigFile
from .progress import doing


def load(
    shape: options.DiskShape = "qwen2-0.5b",
    format: options.DiskFormats = None,
    turns: Annotated[int, typer.Option(help="Of each side, cold and warm.", min=1)] = 3,
    threads: options.Threads = None,
    folder: options.DiskFolder = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON object there as well.")] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """From a process's start to its first token, with the page cache cold and warm, beside transformers.

    And how fast a checkpoint's bytes are read, beside one plain reader and safetensors' load_file. The second start
    finds what the first one has repacked.

    \b
    Examples:
      motley bench load --shape tiny --turns 1
      motley bench load --format bf16 --folder /var/tmp --out load.json
    """
    from ..replicas.bench import load as bench
    from ..replicas.bench.report import table

    with doing("starting") as progress:
        formats = tuple(format or bench.FORMATS)
        report = bench.run(shape=shape, formats=formats, turns=turns, threads=threads, folder=folder, progress=progress)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if as_json else table(report))
