"""`motley bench …`: measurements."""

from __future__ import annotations

import typer

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measurements, each printed again by its command.")


@app.callback()
def _root() -> None:
    """Measurements, each printed again by its command."""
