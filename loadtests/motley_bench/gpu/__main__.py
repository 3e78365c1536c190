"""Entry point of `python -m motley_bench.gpu --out DIR`, which needs none of the command line's own dependencies."""

from __future__ import annotations

import sys

from .gpu_session import main

if __name__ == "__main__":
    sys.exit(main())
