"""`motley bench …`: measurements."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import options
from .config import ConfigFile
from .progress import doing

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Measurements, side by side with peers where they are installed."""


@app.command()
def engine(
    more: Annotated[list[int] | None, typer.Argument(metavar="N", help="Further values of --batch.")] = None,
    shape: Annotated[str, typer.Option(help="Shape of the random int4 checkpoint.")] = "qwen2-0.5b",
    batch: Annotated[
        list[int] | None, typer.Option(metavar="N ...", help="Sequences that decode together; default: 1 8 32.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="transformers or llama.cpp; may be repeated; default: both.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the measured prefill.", min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(help="Tokens decoded by each sequence.", min=1)] = 64,
    threads: options.Threads = None,
    repeats: Annotated[int, typer.Option(help="Times that each prefill is measured.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller shape and less of everything.")] = False,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Prefill and decode rates of the engine beside its peers, on this machine.

    \b
    Examples:
      motley bench engine --quick
      motley bench engine --shape qwen2-0.5b --batch 1 8 32 --threads 2
      motley bench engine --peer transformers --peer llama.cpp --json
    """
    batches = [*(batch or ()), *(more or ())] or [1, 8, 32]
    if any(size < 1 for size in batches):
        raise typer.BadParameter(f"--batch {min(batches)}: expected numbers of at least 1")
    from ..replicas.bench import engine as bench
    from ..replicas.bench.peers import PEERS, SideFailed
    from ..replicas.bench.report import table
    from ..replicas.errors import MotleyError

    try:
        with doing("starting") as progress:
            report = bench.run(
                shape=shape,
                batches=batches,
                peers=peer if peer is not None else PEERS,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                threads=threads,
                repeats=repeats,
                quick=quick,
                progress=progress,
            )
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from error
    except SideFailed as error:
        raise MotleyError(" ".join(str(error).split())) from error
    print(json.dumps(report) if as_json else table(report))
