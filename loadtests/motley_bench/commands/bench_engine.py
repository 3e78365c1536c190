"""Command `motley bench engine`, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_steps

from .bench_output import print_report


def engine(
    more: Annotated[list[int] | None, typer.Argument(metavar="N", help="Further values of --batch.", min=1)] = None,
    device: options.Device = "cpu",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape of the random int4 model; on a GPU qwen2.5-7b, llama-3-8b or qwen3-0.6b, may be repeated; "
            "default: qwen2-0.5b, on a GPU all three."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N ...", help="Sequences that decode together; default: 1 8 32, on a GPU 1 8 64 256.", min=1
        ),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="transformers or llama.cpp; may be repeated; default: all there are.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a prefill; default: 512, on a GPU 128, 1000 and 2048.", min=1)
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(help="Decoded by each sequence; default: 64, on a GPU 128, 1000 and 128.", min=2)
    ] = None,
    threads: options.Threads = None,
    repeats: Annotated[int, typer.Option(help="Times that each prefill is measured.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller shape and less of everything.")] = False,
    speculate_ngram: options.SpeculateNgram = 0,
    seconds: Annotated[float | None, typer.Option(help="On a GPU: begin nothing after this time.", min=1.0)] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="On a GPU: folder for traces of the decode; default: here.")
    ] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure prefill and decode rates of the engine beside its peers, on this machine.

    On a GPU this measures the worker that a replica runs, under concurrent streams, with weights made on the device;
    beside transformers in bf16; each step's share of the roofline; and how long the GPU idles between steps.

    \b
    Examples:
      motley bench engine --quick
      motley bench engine --shape qwen2-0.5b --batch 1 8 32 --threads 2
      motley bench engine --peer transformers --peer llama.cpp --json
      motley bench engine --quick --batch 1 --speculate-ngram 8
      motley bench engine --device cuda --shape qwen2.5-7b --batch 1 64 --prompt-tokens 128 --output-tokens 128
      motley bench engine --device cuda --shape llama-3-8b --batch 1 8 --speculate-ngram 8
    """
    batches = [*(batch or ()), *(more or ())]
    if any(size < 1 for size in batches):
        raise typer.BadParameter(f"--batch {min(batches)}: expected numbers of at least 1")
    from motley.replicas.errors import MotleyError

    from ..reporting.report_table import table
    from ..sides.side_handles import SideError

    lengths = (prompt_tokens, output_tokens)
    try:
        with show_steps("starting") as progress:
            if device == "cpu":
                of_gpu = {"--seconds": seconds, "--out": out}
                if given := [name for name, value in of_gpu.items() if value is not None]:
                    raise typer.BadParameter(f"{given[0]}: expected --device cuda with it")
                report = _on_cpu(shape, batches, peer, lengths, threads, repeats, quick, speculate_ngram, progress)
            else:
                if quick or threads:
                    raise typer.BadParameter("--quick, --threads: expected --device cpu with them")
                report = _on_gpu(device, shape, batches, peer, lengths, seconds, out, speculate_ngram, progress)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from error
    except (SideError, RuntimeError) as error:
        raise MotleyError(" ".join(str(error).split())) from error
    print_report(report, table, None, as_json=as_json)


def _on_cpu(
    shapes: list[str] | None,
    batches: list[int],
    peers: list[str] | None,
    lengths: tuple[int | None, int | None],
    threads: int | None,
    repeats: int,
    quick: bool,
    speculate_ngram: int,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    from ..engine import engine_throughput as bench
    from ..sides.side_handles import PEERS

    if shapes and len(shapes) > 1:
        raise typer.BadParameter(f"--shape {shapes[1]}: expected one shape on a CPU")
    return bench.run(
        shape=shapes[0] if shapes else "qwen2-0.5b",
        batches=batches or [1, 8, 32],
        peers=peers if peers is not None else PEERS,
        prompt_tokens=lengths[0] or 512,
        output_tokens=lengths[1] or 64,
        threads=threads,
        repeats=repeats,
        quick=quick,
        speculate_ngram=speculate_ngram,
        progress=progress,
    )


def _on_gpu(
    device: str,
    shapes: list[str] | None,
    batches: list[int],
    peers: list[str] | None,
    lengths: tuple[int | None, int | None],
    seconds: float | None,
    out: Path | None,
    speculate_ngram: int,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    from ..checkpoints.random_model import CONFIGS
    from ..engine import engine_gpu_streams as bench

    return bench.run(
        shapes=shapes or [*CONFIGS],
        batches=batches or bench.BATCHES,
        lengths=[(lengths[0] or 128, lengths[1] or 128)] if any(lengths) else bench.LENGTHS,
        peers=peers if peers is not None else bench.PEERS,
        device=device,
        seconds=seconds or float("inf"),
        out=out or Path(),
        speculate_ngram=speculate_ngram,
        progress=progress,
    )
