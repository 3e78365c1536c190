"""Benchmarks of `motley bench …`. Each is a module here and a name below."""

from __future__ import annotations

import typer

from .engine import engine
from .exchange import exchange
from .fleet import fleet
from .gpu import gpu
from .kernels import kernels
from .kv import kv
from .load import load
from .prefix import prefix
from .restart import restart
from .routing import routing
from .serve import serve
from .service import service
from .shards import shards
from .tiers import tiers

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Measure parts of Motley, side by side with peers that are installed."""


for _measure in (
    engine,
    exchange,
    fleet,
    gpu,
    kernels,
    kv,
    load,
    prefix,
    restart,
    routing,
    serve,
    service,
    shards,
    tiers,
):
    app.command()(_measure)
