"""Benchmark `motley bench exchange`: time of a sum over the ranks of one host, through shared memory and
through gloo.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.kernels.cpu.c_kernels.shm_collectives import open_shared_memory
from motley.replicas.errors import EngineFault
from motley.replicas.host.measurement_rows import machine, quantile, row, versions

from ..processes.bench_child import BenchChild

Progress = Callable[[str], None]

CHILD = "motley_bench.engine.collective_sums_rank"
SIZES = (4 << 10, 32 << 10, 256 << 10, 4 << 20)  # bytes of fp32: 1, 8 and more tokens of 1,024 features
_COUNT = 200  # number of sums in a turn, at small sizes


def run(
    *, ranks: int = 2, sizes: Sequence[int] = SIZES, turns: int = 5, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Measure the sums and return a report with a row for each size.

    Each rank is a process of one thread, and the two ways take turns. Times are those of rank 0, in microseconds.

    Raises ValueError for fewer than two ranks, EngineFault if there is no C compiler or if a rank ends; then with the
    end of what that rank has written to stderr.
    """
    if ranks < 2:
        raise ValueError(f"ranks: {ranks} is not accepted; expected at least 2")
    if load_library()[0] is None:
        raise EngineFault(load_library()[1])
    before = machine()
    rows = []
    memory = open_shared_memory(ranks)
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            progress(f"starting {ranks} ranks")
            store = str(Path(folder) / "gloo")
            own = f"/proc/{os.getpid()}/fd/{memory}"
            children = [
                stack.enter_context(BenchChild(CHILD, own, store, str(rank), str(ranks))) for rank in range(ranks)
            ]
            for child in children:
                child.read()
            for nbytes in sizes:
                progress(f"sums of {nbytes >> 10} KiB")
                rows.append(_row(children, nbytes, turns))
    finally:
        os.close(memory)
    after = {"load_average_1min_after": machine()["load_average_1min"]}
    return {"bench": "exchange", "machine": before | after, "versions": versions("motley", "torch"), "rows": rows}


def _row(children: Sequence[BenchChild], nbytes: int, turns: int) -> dict[str, Any]:
    count = max(10, min(_COUNT, _COUNT * SIZES[1] // nbytes))
    samples: dict[str, list[float]] = {"shared": [], "gloo": []}
    for _ in range(turns):
        for child in children:
            child.write({"bytes": nbytes, "count": count})
        first, *_ = [child.read() for child in children]
        for side, times in samples.items():
            times += [seconds * 1e6 for seconds in first[side]]
    workload = {"ranks": len(children), "bytes": nbytes, "dtype": "float32"}
    found = row(
        "sum over ranks", workload, "µs", samples["shared"], peer="gloo", peer_samples=samples["gloo"],
        higher_is_better=False,
    )  # fmt: skip
    return found | {"p99": quantile(samples["shared"], 0.99), "peer_p99": quantile(samples["gloo"], 0.99)}
