"""Command `motley bench kernels`."""

from __future__ import annotations

from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_steps

from .bench_options import BenchOut
from .bench_output import print_report

_MAX_PRINTED_FAILURES = 5  # failures that are printed: the report has all


def kernels(
    device: options.Device = "cpu",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Layer shapes of qwen2.5-0.5b, qwen2.5-7b, llama-3-8b, qwen3-32b or qwen3-0.6b; may be repeated."
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            metavar="M",
            help="Rows of activations; of attention batches, above 64 new tokens; may be repeated; default: 1 to 2048.",
            min=1,
        ),
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Operator; may be repeated; default: all.")] = None,
    threads: options.Threads = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after so long: make no more inputs, and begin nothing.", min=1.0)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The smallest model, 1, 8 and 64 tokens.")] = False,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure operators one by one: time, bandwidth and operations per second, beside torch.matmul, int4pack and SDPA.

    Each result is compared with a reference before its time counts, and inputs are rotated so that the cache does not
    hold them.

    \b
    Examples:
      motley bench kernels --quick
      motley bench kernels --model qwen2.5-7b --tokens 1 --tokens 16 --json
      motley bench kernels --device cuda --out loadtests/results/kernels-h200.json
    """
    import time

    from motley.kernels.launch.model_shapes import MODELS
    from motley.replicas.errors import MotleyError

    from ..kernels import kernel_rates as bench
    from ..reporting.report_table import table

    models = model or (["qwen2.5-0.5b"] if quick else [each.name for each in MODELS])
    until = time.monotonic() + (seconds or float("inf"))
    try:
        with show_steps("starting") as progress:
            report = bench.run(
                device=device,
                models=models,
                tokens=tokens or ((1, 8, 64) if quick else None),
                ops=op or (),
                threads=threads,
                progress=progress,
                enough=lambda: time.monotonic() > until,
            )
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from error
    print_report(report, table, out, as_json=as_json)
    if skipped := report["skipped"]:
        typer.echo("\n".join(f"{each['case']}: skipped: {each['skipped']}" for each in skipped), err=True)
    if failed := report["failed"]:
        failures = "; ".join(f"{each['case']}: {each['error']}" for each in failed[:_MAX_PRINTED_FAILURES])
        raise MotleyError(f"{len(failed)} of the operators failed: {failures}")
