"""Commands `motley bench …`: each is a module here and a name below, and calls a `run` that returns a report.

The product finds `app` through the entry point in pyproject.toml. May import all of this package and the command line's
options.
"""

from __future__ import annotations

import typer

from motley.cli.numbers import check_all_numbers

from .bench_accuracy import accuracy
from .bench_engine import engine
from .bench_exchange import exchange
from .bench_fleet import fleet
from .bench_gpu import gpu
from .bench_kernels import kernels
from .bench_kv import kv
from .bench_load import load
from .bench_prefix import prefix
from .bench_restart import restart
from .bench_routing import routing
from .bench_serve import serve
from .bench_service import service
from .bench_shards import shards
from .bench_tiers import tiers

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def _root() -> None:
    """Measure parts of Motley, side by side with peers that are installed."""


for _measure in (
    accuracy,
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
check_all_numbers(app)
