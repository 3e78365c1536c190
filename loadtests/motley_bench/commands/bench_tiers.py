"""Command `motley bench tiers`."""

from __future__ import annotations

from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_options import BenchOut, DiskFolder, DiskFormats, DiskShape
from .bench_output import print_report, refused


def tiers(
    shape: DiskShape = "qwen2-0.5b",
    format: DiskFormats = None,
    share: Annotated[float, typer.Option(help="Share of the weights that fits in memory.", min=0.01, max=0.99)] = 0.5,
    tokens: Annotated[int, typer.Option(help="Tokens to decode.", min=8)] = 48,
    turns: Annotated[int, typer.Option(help="Turns of each side.", min=1)] = 3,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    folder: DiskFolder = None,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure how fast a model decodes with memory for part of its weights, beside the prediction and the whole model.

    The other layers are read from disk in every step, or copied to a GPU from the host's memory, and then from disk.
    The command fails if the tokens differ from the whole model's.

    \b
    Examples:
      motley bench tiers --shape quick --turns 1
      motley bench tiers --format bf16 --share 0.4 --folder /var/tmp --out tiers.json
    """
    from ..engine import offloaded_decode as bench
    from ..reporting.report_table import table

    with refused(), show_activity("starting") as progress:
        formats = tuple(format or bench.FORMATS)
        report = bench.run(
            shape=shape, formats=formats, share=share, tokens=tokens, turns=turns, threads=threads, device=device,
            folder=folder, progress=progress,
        )  # fmt: skip
    print_report(report, table, out, as_json=as_json)
