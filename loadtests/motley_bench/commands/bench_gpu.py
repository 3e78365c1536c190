"""Command `motley bench gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motley.cli.config import ConfigFile


def gpu(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the results.")],
    seconds: Annotated[float, typer.Option(help="End after so long.", min=1.0)] = 480.0,
    rehearse: Annotated[
        str | None, typer.Option(metavar="CC", help="No GPU: the steps alone, with the kernels of 6.1, say.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Operator; may be repeated; default: all.")] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="checks, engine, divided, tuning, kernels or streams, which then has the time; default: all."
        ),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Run all checks and measurements on a GPU in one command: check, tune, measure kernels and engine, write a report.

    Where this program's own dependencies are not installed, `python -m motley_bench.gpu` does the same with
    torch, Triton, transformers, safetensors and numpy alone.

    \b
    Examples:
      motley bench gpu --out results/
      motley bench gpu --out results/ --part streams
      motley bench gpu --out results/ --rehearse 6.1
    """
    from motley.kernels.device.compute_capability import CAPABILITIES
    from motley.replicas.errors import MotleyError

    from ..gpu import gpu_session as bench

    capabilities = ["{}.{}".format(*each) for each in CAPABILITIES]
    if rehearse is not None and rehearse not in capabilities:
        raise typer.BadParameter(f"--rehearse {rehearse}: expected one of {', '.join(capabilities)}")
    if unknown := [name for name in part or () if name not in bench.PARTS]:
        raise typer.BadParameter(f"--part {unknown[0]}: expected {', '.join(bench.PARTS)}")
    try:
        right = bench.run(out, seconds, rehearse or "", op or (), part or ())
    except KeyError as error:
        raise typer.BadParameter(f"--op {error.args[0]}") from error
    except RuntimeError as error:
        raise MotleyError(str(error)) from error
    print(f"written to {out}")
    if not right:
        raise MotleyError(f"not all was right: {out / 'summary.json'}")
