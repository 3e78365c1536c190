"""Command `motley bench accuracy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_steps

from .bench_options import BenchOut
from .bench_output import print_report


def accuracy(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, or Hugging Face id.")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="Held-out text.", exists=True, dir_okay=False)],
    device: options.Device = "cpu",
    tokens: Annotated[int, typer.Option(help="Tokens of the text.", min=1)] = 4096,
    threads: options.Threads = None,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure how much the kernels' arithmetic changes a model's next tokens, beside the same weights in fp32.

    On a CPU: activations in float32 and bfloat16, integer kernels, KV in int8, and the fast numerics. On a GPU: what it
    chooses, and KV in int8. Take a model that does not know the text by heart, as the demo model does.

    \b
    Examples:
      motley bench accuracy ./out/smollm2-135m-int4 --text out/held-out.txt
      motley bench accuracy ./my-model --text pages.txt --device cuda
    """
    from motley.replicas.model.checkpoint_inspection import resolve_model

    from ..engine import arithmetic_accuracy as bench
    from ..reporting.report_table import table

    try:
        with show_steps("starting") as progress:
            report = bench.run(
                resolve_model(options.find_model(model)),
                text.read_text(encoding="utf-8"),
                device=device,
                tokens=tokens,
                threads=threads,
                progress=progress,
            )
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from error
    print_report(report, table, out, as_json=as_json)
