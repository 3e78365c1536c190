"""How long something takes on a device, with its inputs out of the cache, and what the device's memory gives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Timing", "copies", "copy_bandwidth", "time_of"]

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: percentiles over rounds."""

    p20: float
    p50: float
    p80: float


def time_of(runs: Sequence[Run], device: torch.device, rounds: int = 20, budget_s: float = 1.0) -> Timing:
    """Of one of `runs`, which do the same on inputs of their own, in turn, so that none finds its input in a cache.

    On a GPU all of them are captured into one CUDA graph: what is measured is the device, not who launches. At
    least three rounds, if so many are asked for, and no more than fit the budget. Raises what a run raises.
    """
    once = _on_gpu(runs, device) if device.type == "cuda" else _on_cpu(runs)
    first = max(once(), 1e-7)
    taken = [once() for _ in range(max(min(3, rounds), min(rounds, int(budget_s / first))))]
    each = sorted(seconds / len(runs) for seconds in taken)
    return Timing(each[len(each) // 5], statistics.median(each), each[-1 - len(each) // 5])


def copies(num_bytes: int, cache_bytes: int, most: int = 64) -> int:
    """How many inputs of that size it takes so that each has left the cache before its turn comes again."""
    return max(2, min(most, -(-4 * cache_bytes // max(1, num_bytes))))


def copy_bandwidth(device: torch.device, num_bytes: int = 2**30) -> float:
    """Bytes/s read and written by a copy that is larger than any cache."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_of([lambda: target.copy_(source)], device).p50


def _on_cpu(runs: Sequence[Run]) -> Callable[[], float]:
    def once() -> float:
        began = time.perf_counter()
        for run in runs:
            run()
        return time.perf_counter() - began

    once()
    return once


def _on_gpu(runs: Sequence[Run], device: torch.device) -> Callable[[], float]:
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for run in runs:  # compiles what is not compiled, which a capture must not
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def once() -> float:
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    once()
    return once
