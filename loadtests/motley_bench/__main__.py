"""Entry point of `python -m motley_bench COMMAND`: `motley bench` from a checkout that is only on PYTHONPATH."""

from __future__ import annotations

import sys

from motley.cli.app import run

from .commands import app

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], app, "python -m motley_bench"))
