"""Process of one rank of `motley bench exchange`: `python -m motley_bench.engine.collective_sums_rank MEMORY STORE RANK
SIZE`.

MEMORY is the path of the file that `open_shared_memory` opened, STORE the path of the file through which gloo's ranks
find each other. The process reads lines of {"bytes", "count"}, times so many sums of that size in each way, and answers
each line with {"shared": [seconds], "gloo": [seconds]}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from motley.kernels.cpu.c_kernels.shm_collectives import ShmCollectives
from motley.replicas.parallel.transport.collective import CollectiveExchange

from ..processes.bench_child import respond

TIMEOUT_S = 60.0


def main(memory: str, store: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    descriptor = os.open(memory, os.O_RDWR)
    shared = ShmCollectives(descriptor, rank, size, timeout_s=TIMEOUT_S)
    os.close(descriptor)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    assert dist.group.WORLD is not None
    sides: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "shared": shared.sum,
        "gloo": CollectiveExchange(dist.group.WORLD).sum,
    }
    respond({"ready": rank})
    for line in sys.stdin:
        request = json.loads(line)
        x = torch.zeros(request["bytes"] // 4)
        respond({name: _timed(add, x, request["count"]) for name, add in sides.items()})
    dist.destroy_process_group()


def _timed(add: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, count: int) -> list[float]:
    """Return the seconds of each of `count` sums, after five that are not counted."""
    times = []
    for number in range(count + 5):
        began = time.perf_counter()
        add(x)
        if number >= 5:
            times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
