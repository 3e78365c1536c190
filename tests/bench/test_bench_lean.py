"""`motley bench gpu` where no more is installed than torch, Triton, transformers, safetensors and numpy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"
NEEDED = ("torch", "triton", "transformers", "safetensors", "numpy")
RUN = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(sys.argv[1:])  # None: to import it raises ModuleNotFoundError
import motley_bench.gpu, motley_bench.engine.engine_gpu_rows, motley_bench.engine.engine_gpu_streams
import motley_bench.sides.side_worker, motley_bench.sides.side_static
for module in pkgutil.iter_modules(motley_bench.gpu.__path__):
    importlib.import_module(f"motley_bench.gpu.{module.name}")
from late_engine_child import late_streams
print(late_streams().run(2, 20, 6, 60.0)["tokens"])
"""


def closure(names: Iterable[str]) -> set[str]:
    """Distributions that these bring along."""
    left, found = list(names), set[str]()
    while left:
        name = plain(left.pop())
        try:
            wanted = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:  # of another platform
            continue
        if name not in found:
            found.add(name)
            left += [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in wanted if "extra ==" not in each]
    return found


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_streams_need_nothing_else() -> None:
    there = closure(NEEDED)
    packages = metadata.packages_distributions().items()
    missing = {name for name, owners in packages if not there & set(map(plain, owners))} - {"motley", "motley_bench"}
    assert {"ray", "redis", "grpc", "xgrammar"} & missing, "this machine has more than that"
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-c", RUN, *sorted(missing)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ran.stdout == "12\n", ran.stderr[-2000:]
