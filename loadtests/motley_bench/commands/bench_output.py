"""End of a benchmark: it prints its report, or refuses its options."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from motley.replicas.errors import MotleyError


@contextmanager
def refused() -> Iterator[None]:
    """Convert options that a benchmark refuses to typer.BadParameter by the option's name, and file errors to
    MotleyError.

    Raises typer.BadParameter and MotleyError.
    """
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from error
    except OSError as error:
        raise MotleyError(str(error)) from error


def print_report(
    report: dict[str, Any], text: Callable[[dict[str, Any]], str], out: Path | None, *, as_json: bool
) -> None:
    """Write the report to the file `out`, and to stdout as one JSON object or as text. Raises OSError of the file."""
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if as_json else text(report))
