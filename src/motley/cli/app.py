"""Root of the `motley` command: its subcommands, and how errors are printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ..replicas.errors import InvalidRequest, MotleyError
from . import chat, doctor, fit, fleet, generate, kernels, keys, plan, profile, serve
from .bench_commands import bench
from .numbers import check_all_numbers

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

# typer has its own copy of click in some versions and click's in others: both derive these.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
ClickError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="motley",
    rich_markup_mode=None,  # plain help: quick, and examples keep their lines
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"motley {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Serve one quantized language model on whatever mix of devices you own.

    \b
    Examples:
      motley serve                               the built-in demo model, on this CPU
      motley generate demo -p "The with statement"
      motley chat "What is a generator?"         ask a running service
      motley doctor                              what this machine offers, and what would be chosen
      motley fit org/name                        which devices would hold a model, and how long a context
    """


app.command()(serve.serve)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(doctor.doctor)
app.command()(fit.fit)
app.command()(plan.plan)
app.command()(profile.profile)
app.add_typer(bench, name="bench")
app.add_typer(fleet.app, name="fleet")
app.add_typer(keys.app, name="keys")
app.add_typer(kernels.app, name="kernels")
check_all_numbers(app)


def run(arguments: Sequence[str], commands: typer.Typer = app, name: str = "motley") -> int:
    """Run one command line. Returns the exit status: 1 for a failure, 2 for a wrong call, 130 for Ctrl-C."""
    try:
        status = typer.main.get_command(commands).main(list(arguments), prog_name=name, standalone_mode=False)
    except MotleyError as error:
        return _print_error(error.message, USAGE if isinstance(error, InvalidRequest) else FAILED)
    except ClickError as error:
        return _print_usage_error(error)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has ended, so buffered output is dropped.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status if isinstance(status, int) else OK


def _print_usage_error(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "motley"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if message.startswith("Usage:"):  # called without a subcommand: show the help
        print(message)
        return USAGE
    hint = f" (see {command} --help)" if isinstance(error, UsageError) else ""
    line = " ".join(message.split()).removeprefix("Invalid value: ").rstrip(".")
    return _print_error(f"{line}{hint}", USAGE, command)


def _print_error(message: str, status: int, command: str = "motley") -> int:
    print(f"{command}: {message}", file=sys.stderr)
    return status
