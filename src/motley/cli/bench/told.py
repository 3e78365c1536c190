"""How a benchmark ends: with a report, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from ...replicas.errors import MotleyError


@contextmanager
def refused() -> Iterator[None]:
    """What a benchmark does not accept, by the option's name, and what it could not write or read.

    Raises typer.BadParameter and MotleyError.
    """
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from error
    except OSError as error:
        raise MotleyError(str(error)) from error


def tell(report: dict[str, Any], text: Callable[[dict[str, Any]], str], out: Path | None, *, as_json: bool) -> None:
    """The report into the file `out`, and to stdout as one JSON object or as text. Raises OSError of the file."""
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if as_json else text(report))
