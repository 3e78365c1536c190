"""Command `motley bench exchange`."""

from __future__ import annotations

from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_options import BenchOut
from .bench_output import print_report


def exchange(
    ranks: Annotated[int, typer.Option(help="Processes, of one thread each.", min=2, max=64)] = 2,
    kib: Annotated[
        list[int] | None, typer.Option(help="KiB of a sum; may be repeated; default: 4, 32, 256 and 4096.", min=1)
    ] = None,
    turns: Annotated[int, typer.Option(help="Turns of each side.", min=1)] = 5,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure how long ranks on one host take to add up their tensors: through shared memory, beside torch's gloo.

    A layer of a model that is divided among ranks needs two such sums.

    \b
    Examples:
      motley bench exchange
      motley bench exchange --ranks 4 --kib 32 --json
    """
    from ..engine import collective_sums as bench
    from ..reporting.report_table import table

    with show_activity("starting") as progress:
        sizes = [each << 10 for each in kib] if kib else bench.SIZES
        report = bench.run(ranks=ranks, sizes=sizes, turns=turns, progress=progress)
    print_report(report, table, out, as_json=as_json)
