"""How long something takes on a device, with its inputs out of the cache, and what the device's memory gives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Rotation", "Timing", "copy_bandwidth", "time_of"]

Run = Callable[[], object]
_SWEPT_COPIES = 16


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: percentiles over rounds."""

    p20: float
    p50: float
    p80: float


def time_of(
    runs: Sequence[Run], device: torch.device, rounds: int = 20, budget_s: float = 1.0, sweep_bytes: int = 0
) -> Timing:
    """Of one of `runs`, which do the same on inputs of their own, in turn, so that none finds its input in a cache.

    On a GPU all of them are captured into one CUDA graph: what is measured is the device, not who launches. At
    least three rounds, if so many are asked for, and no more than fit the budget. Raises what a run raises.

    sweep_bytes  where the inputs together do not fill the cache: so much is written before each run, and the time
                 of as many sweeps without runs is taken off
    """
    sweep: list[Run] = []
    if sweep_bytes:
        room = torch.empty(sweep_bytes, dtype=torch.uint8, device=device)
        sweep = [room.zero_]
    both = [step for run in runs for step in (*sweep, run)]
    once = _on_gpu(both, device) if device.type == "cuda" else _on_cpu(both)
    first = max(once(), 1e-7)
    number = max(min(3, rounds), min(rounds, int(budget_s / first)))
    taken = [once() for _ in range(number)]
    aside = 0.0
    if sweep:
        alone = _on_gpu(sweep * len(runs), device) if device.type == "cuda" else _on_cpu(sweep * len(runs))
        aside = statistics.median(alone() for _ in range(number))
    each = sorted(max(seconds - aside, 1e-9) / len(runs) for seconds in taken)
    return Timing(each[len(each) // 5], statistics.median(each), each[-1 - len(each) // 5])


@dataclass(frozen=True, slots=True)
class Rotation:
    """How inputs are kept out of the cache: so many copies in turn, or with few the cache swept before each."""

    copies: int
    sweep_bytes: int = 0

    @classmethod
    def past(cls, num_bytes: int, cache_bytes: int, most: int) -> Rotation:
        """Inputs of that size have left the cache before their turn comes again; `most`: copies that can be made."""
        wanted = max(2, -(-4 * cache_bytes // max(1, num_bytes)))
        return cls(wanted) if wanted <= most else cls(_SWEPT_COPIES, 2 * cache_bytes)


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
