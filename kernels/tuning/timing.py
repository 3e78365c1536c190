"""How long something takes on a device, with its inputs out of the cache."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["InputRotation", "Timing", "time_runs", "time_uncaptured"]

TimedRun = Callable[[], object]
_SWEPT_COPIES = 16
_WARM_S = 0.3  # of work before a device that was idle is measured: until then its clocks may be a fifth of their most
_REPLAYS = 3  # that are measured together, behind one that is not
_LONG_S = 250e-6  # a graph must last: longer than the host takes to launch one, which so stays ahead of the device
_MOST_TURNS = 128  # that a graph has of the runs, to last so long
_last_work_end: dict[torch.device, float] = {}  # device -> when what was measured there last had ended


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: percentiles over rounds."""

    p20: float
    p50: float
    p80: float


def time_runs(
    runs: Sequence[TimedRun], device: torch.device, rounds: int = 20, budget_s: float = 1.0, sweep_bytes: int = 0
) -> Timing:
    """Of one of `runs`, which do the same on inputs of their own, in turn, so that none finds its input in a cache.

    On a GPU all of them are captured into one CUDA graph, and replays of it are measured that are launched while the
    device still works: what is measured is the device, not who launches. At least three rounds, if so many are asked
    for, and no more than fit the budget. Raises what a run raises.

    sweep_bytes  where the inputs together do not fill the cache: so much is written before each run, and the time
                 of as many sweeps without runs is taken off
    """
    sweep: list[TimedRun] = []
    if sweep_bytes:
        room = torch.empty(sweep_bytes, dtype=torch.uint8, device=device)
        sweep = [room.zero_]
    prepared = _on_gpu if device.type == "cuda" else _on_cpu
    once = prepared([step for run in runs for step in (*sweep, run)], device)
    number = _rounds(once, rounds, budget_s)
    taken = [once() for _ in range(number)]
    aside = 0.0
    if sweep:
        alone = prepared(sweep * len(runs), device)
        aside = statistics.median(alone() for _ in range(number))
    _last_work_end[device] = time.perf_counter()
    return _timing([max(seconds - aside, 1e-9) / len(runs) for seconds in taken])


def time_uncaptured(run: TimedRun, device: torch.device, rounds: int = 20, budget_s: float = 1.0) -> Timing:
    """Of a run that takes the device longer than the host takes to launch it, launched as it is, in no graph."""
    if device.type == "cuda":
        run()  # compiles what is not compiled
        _warm_up_clocks(run, device)
        once = _timed_behind_warmup(run)
    else:
        once = _on_cpu([run], device)
    taken = [once() for _ in range(_rounds(once, rounds, budget_s))]
    _last_work_end[device] = time.perf_counter()
    return _timing(taken)


@dataclass(frozen=True, slots=True)
class InputRotation:
    """How inputs are kept out of the cache: so many copies in turn, or with few the cache swept before each."""

    copies: int
    sweep_bytes: int = 0

    @classmethod
    def past(cls, num_bytes: int, cache_bytes: int, most: int) -> InputRotation:
        """Inputs of that size have left the cache before their turn comes again; `most`: copies that can be made."""
        wanted = max(2, -(-4 * cache_bytes // max(1, num_bytes)))
        return cls(wanted) if wanted <= most else cls(_SWEPT_COPIES, 2 * cache_bytes)


def _rounds(once: Callable[[], float], most: int, budget_s: float) -> int:
    """Of `once`, which is called to see how long a round takes."""
    began = time.perf_counter()
    once()
    spent = max(time.perf_counter() - began, 1e-7)
    return max(min(3, most), min(most, int(budget_s / spent)))


def _timing(taken: Sequence[float]) -> Timing:
    each = sorted(taken)
    return Timing(each[len(each) // 5], statistics.median(each), each[-1 - len(each) // 5])


def _on_cpu(runs: Sequence[TimedRun], device: torch.device) -> Callable[[], float]:
    def once() -> float:
        began = time.perf_counter()
        for run in runs:
            run()
        return time.perf_counter() - began

    once()
    return once


def _on_gpu(runs: Sequence[TimedRun], device: torch.device) -> Callable[[], float]:
    """Seconds of all runs once. A graph that would end before the next is launched has them several times."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for run in runs:  # compiles what is not compiled, which a capture must not
            run()
    torch.cuda.synchronize(device)
    graph, turns = _lengthen_graph(_capture_graph(runs, stream), 1, runs, stream)
    _warm_up_clocks(graph.replay, device)
    graph, turns = _lengthen_graph(graph, turns, runs, stream)  # until then the clocks were slower
    each = _timed_behind_warmup(graph.replay)
    each()
    return lambda: each() / turns


def _lengthen_graph(graph: Any, turns: int, runs: Sequence[TimedRun], stream: Any) -> tuple[Any, int]:
    """One that lasts long enough, and how many times it has the runs. turns: that `graph` has them."""
    took = max(_timed_behind_warmup(graph.replay)(), 1e-9)
    wanted = min(_MOST_TURNS, math.ceil(turns * _LONG_S / took))
    return (graph, turns) if wanted <= turns else (_capture_graph([*runs] * wanted, stream), wanted)


def _capture_graph(runs: Sequence[TimedRun], stream: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    return graph


def _warm_up_clocks(run: TimedRun, device: torch.device) -> None:
    """Until the clocks have risen: as long as nothing was measured there before, but no longer than that takes."""
    now = time.perf_counter()
    until = now + min(_WARM_S, now - _last_work_end.get(device, -math.inf))
    while time.perf_counter() < until:
        for _ in range(_REPLAYS):
            run()
        torch.cuda.synchronize(device)


def _timed_behind_warmup(run: TimedRun) -> Callable[[], float]:
    """Seconds of one of several runs that wait in the stream behind one that is not measured.

    What the first takes from the host to an idle device is before the first mark; the others find the device at work.
    """
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def once() -> float:
        run()
        began.record()
        for _ in range(_REPLAYS):
            run()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3 / _REPLAYS

    return once
