"""Command `motley bench kv`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_steps

from .bench_options import BenchOut
from .bench_output import print_report


def kv(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, Hugging Face id, or demo.")] = "demo",
    device: options.Device = "cpu",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Activations; may be repeated; default: float32 and bfloat16, on a GPU its own."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Held-out text; default: the demo model's.", exists=True, dir_okay=False),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text.", min=1)] = 4096,
    batch: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Sequences; may be repeated; default: 1 and 8.", min=1)
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Tokens in KV before decode; may be repeated; default: 128 and 1024.", min=1),
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="Decoded by each sequence.", min=2)] = 64,
    threads: options.Threads = None,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure what KV in int8 (--kv-dtype int8) does to a model: quality on held-out text, memory, and decode speed.

    The same tokens go through the same engine twice, with KV in int8 and with KV in the dtype of the activations; the
    divergence compares the second run's distributions of the next token with the first's. Decodes take turns.

    \b
    Examples:
      motley bench kv
      motley bench kv ./my-model --text pages.txt --context 4096 --batch 16
      motley bench kv --device cuda --out loadtests/results/kv-h200.json
    """
    from motley.replicas.demo import demo_path
    from motley.replicas.model.checkpoint_inspection import resolve_model

    from ..engine import int8_kv as bench
    from ..reporting.report_table import table

    try:
        with show_steps("starting") as progress:
            report = bench.run(
                resolve_model(options.find_model(model)),
                (text or demo_path() / "heldout.txt").read_text(encoding="utf-8"),
                device=device,
                dtypes=dtype,
                tokens=tokens,
                batches=batch or (1, 8),
                contexts=context or (128, 1024),
                output_tokens=output_tokens,
                threads=threads,
                progress=progress,
            )
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from error
    print_report(report, table, out, as_json=as_json)
