"""Commands `motley kernels …`: compile, list and tune the device's kernels."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .config import ConfigFile
from .progress import show_activity, show_steps

if TYPE_CHECKING:
    from ..kernels.launch.kernel_operation import KernelOperation
    from ..kernels.tuning.compile_matrix import MatrixRow

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Compile kernels of the GPU path without a GPU, and tune them with or without one."""


@app.command(name="compile")
def compile_(
    more: Annotated[list[str] | None, typer.Argument(metavar="CC", help="Further values of --cc.")] = None,
    cc: Annotated[list[str] | None, typer.Option(metavar="CC ...", help="Capabilities, such as 61 or 6.1.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All capabilities.")] = False,
    op: Annotated[list[str] | None, typer.Option(help="Operator; may be repeated; default: all.")] = None,
    workers: Annotated[int, typer.Option(help="Compilers at a time; 0: as many as cores.", min=0)] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every kernel once for each capability, as it is tuned.")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table into that page, between its marks.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --all: fail unless this page has the table of these kernels."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Seconds of two reference cores; fail if compiling takes more.", min=0.01),
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Print only what is at fault, and how many.")] = False,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Compile every operator as it would be launched, and check the result.

    It checks registers, spills, shared memory against the capability's limits, occupancy, and the PTX instructions that
    do the products. Ends with status 1 if a kernel spills, exceeds a limit, or has the wrong instructions, or if all of
    it took more time of two cores than --budget; time in which other processes had the cores does not count. A budget
    is for one machine: how fast this one is beside it is measured first, on a kernel that never changes.

    A page that --table wrote names the sources it was made from. If --check finds there the same sources and Triton as
    here, every kernel is compiled once for each capability, as by --quick; otherwise all is compiled, and must give
    that page's table.

    \b
    Examples:
      motley kernels compile --cc 61 75 90
      motley kernels compile --all --json
      motley kernels compile --all --op w4a16_gemv --workers 2
    """
    capabilities = _capabilities([*(cc or ()), *(more or ())], everything=everything)
    operations = _operations(op)
    from ..kernels.tuning import compile_matrix, matrix_page

    _need_the_compiler()
    if check is not None and (not everything or op or quick or table is not None):
        raise typer.BadParameter("--check: needs --all, and takes neither --op nor --quick nor --table")
    current = check is not None and matrix_page.is_page_current(check)
    if current:
        typer.echo(f"{check}: of these sources; every kernel is compiled once for each capability", err=True)
    with show_steps("compiling") as progress:
        rows, spent = compile_matrix.run_matrix(
            operations,
            capabilities,
            workers or os.cpu_count() or 1,
            lambda count, of: progress("compiling", count, of),
            quick=quick or current,
            calibrated=budget is not None,
        )
    faults = [row for row in rows if row.fault]
    if as_json:
        from .. import __version__

        report = {
            "bench": "kernels compile",
            "versions": {"motley": __version__, **_triton()},
            "seconds": spent.seconds,
        }
        report |= {"cpu_seconds": spent.cpu_seconds, "pace": spent.pace, "cached": sum(row.cached for row in rows)}
        print(json.dumps({**report, "source": "static", "rows": [row.to_json() for row in rows]}))
    else:
        for row in faults if summary else rows:
            print(_line(row))
        print(
            f"Triton {_triton()['triton']}: {len(rows)} kernels, {len(faults)} at fault, {spent.describe(rows, budget)}"
        )
    if table is not None:
        matrix_page.write_page(table, rows, complete=everything and not (op or quick or faults))
    other = check is not None and not current and matrix_page.read_matrix(check) != matrix_page.render_matrix(rows)
    if other:
        typer.echo(f"{check}: its table is not what was compiled; --table {check} writes it anew", err=True)
    elif check is not None and not current:
        typer.echo(f"{check}: its table is right, but of other sources; --table {check} notes these", err=True)
    if spent.over(budget):
        message = (
            f"over its budget: compiling took {spent.two_core_seconds:.0f} s of two cores, "
            f"{spent.reference_seconds:.0f} s at the pace of its budget, and may take {budget:g} s"
        )
        typer.echo(message, err=True)
    if faults or other or spent.over(budget):
        raise typer.Exit(1)


def _capabilities(given: list[str], *, everything: bool) -> list[tuple[int, int]]:
    from ..kernels.device.compute_capability import CAPABILITIES

    if everything or not given:
        return list(CAPABILITIES)
    by_name = {name: each for each in CAPABILITIES for name in ("{}.{}".format(*each), "{}{}".format(*each))}
    for name in given:
        if name not in by_name:
            expected = ", ".join(name for name in by_name if "." in name)
            raise typer.BadParameter(f"--cc {name}: expected some of {expected}")
    return [by_name[name] for name in given]


def _operations(names: list[str] | None) -> list[KernelOperation]:
    from ..kernels.registry import OPERATIONS, find_operation

    try:
        return [find_operation(name) for name in names] if names else list(OPERATIONS)
    except KeyError as error:
        raise typer.BadParameter(f"--op {error.args[0]}") from error


def _need_the_compiler() -> None:
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise typer.BadParameter("TRITON_INTERPRET is set: the interpreter and the compiler cannot share a process")


def _triton() -> dict[str, str]:
    import triton

    return {"triton": triton.__version__}


def _line(row: MatrixRow) -> str:
    config = " ".join(f"{name}={value}" for name, value in row.config.items())
    mix = " ".join(f"{name}:{count}" for name, count in (row.mix or {}).items())
    used = f"{row.registers} registers, {row.spilled} B spilled, {row.shared} of {row.shared_limit} B shared"
    took = "from the cache" if row.cached else f"{row.seconds:.1f} s"
    state = f"FAULT {row.fault}" if row.fault else f"{used}, {row.occupancy:.0%} occupancy, {took}"
    return f"{row.capability[0]}.{row.capability[1]}  {row.kernel}  {row.shape}  [{config}]  {state}  {mix}"


@app.command()
def tune(
    op: Annotated[list[str] | None, typer.Option(help="Operator; may be repeated; default: all.")] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Choose without a GPU, by the compiled code and the roofline.")
    ] = False,
    missing: Annotated[
        bool,
        typer.Option("--missing", help="With --static: only shapes that are not in the tables."),
    ] = False,
    cc: Annotated[
        list[str] | None, typer.Option(metavar="CC", help="With --static: capabilities; default: all.")
    ] = None,
    device: Annotated[str, typer.Option(help="GPU to measure on.")] = "cuda:0",
    seconds: Annotated[float | None, typer.Option(help="Stop measuring after so long.", min=1.0)] = None,
    workers: Annotated[int, typer.Option(help="Compilers at a time; 0: as many as cores.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Default: $MOTLEY_TUNED, if set and measured; else this installation's tables."
        ),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Choose a config for each operator and shape, and write it to the file where launches look it up.

    On a GPU every config is checked against the reference before its time counts, and entries say "measured". With
    --static nothing is run, and entries say "static".

    \b
    Examples:
      motley kernels tune
      motley kernels tune --op w4a16_gemm --seconds 120 --out tuned/
      motley kernels tune --static --cc 61
    """
    import time

    import torch

    from ..kernels.compiler.compile_pool import compile_all
    from ..kernels.device import device_context
    from ..kernels.launch.config_tables import TUNED_FOLDER, table_roots
    from ..kernels.tuning import table_writer as tuner

    _need_the_compiler()
    operations = _operations(op)
    if static:
        with show_steps("compiling") as progress:
            capabilities = _capabilities(cc or [], everything=False)
            for path in tuner.write_static_tables(
                operations, capabilities, workers or os.cpu_count() or 1, out or TUNED_FOLDER,
                lambda count, of: progress("compiling", count, of), missing=missing,
            ):  # fmt: skip
                print(path)
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("--device: torch finds no GPU here; --static chooses without one")
    until = time.monotonic() + (seconds or float("inf"))
    with show_activity("tuning") as show:
        for path in tuner.write_measured_tables(
            operations, device_context.gpu_context(torch.device(device)), out or table_roots()[0], show,
            lambda: time.monotonic() > until,
            lambda jobs: compile_all(jobs, workers or os.cpu_count() or 1, lambda n, of: show(f"{n} of {of} compiled")),
        ):  # fmt: skip
            print(path)


@app.command(name="list")
def list_(
    cc: Annotated[list[str] | None, typer.Option(metavar="CC", help="Capabilities; default: all.")] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Show which operators a capability has, in which precision, and where their configs come from.

    \b
    Examples:
      motley kernels list
      motley kernels list --cc 61 --json
    """
    from ..kernels.tuning.operation_listing import list_operations

    rows = list_operations(_capabilities(cc or [], everything=False))
    if as_json:
        print(json.dumps([row.to_json() for row in rows]))
        return
    for row in rows:
        print(row)
