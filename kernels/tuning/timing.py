"""Timing of functions on a device, with their inputs out of the cache."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

TimedRun = Callable[[], object]
_SWEPT_COPIES = 16
_WARM_S = 0.3  # seconds of work before an idle device is measured: until then its clocks may be a fifth of the maximum
_REPLAYS = 3  # replays measured together, after one that is not measured
_LONG_S = 250e-6  # least duration of a graph: longer than its launch takes on the host, which so stays ahead
_MAX_TURNS = 128  # most repetitions of the runs in one graph, to last so long
_last_work_end: dict[torch.device, float] = {}  # device -> end of the last measurement on it


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured seconds of one run of a function: 20th, 50th and 80th percentile over rounds."""

    p20: float
    p50: float
    p80: float


def time_runs(
    runs: Sequence[TimedRun], device: torch.device, rounds: int = 20, budget_s: float = 1.0, sweep_bytes: int = 0
) -> Timing:
    """Return the timing of one of `runs`, which do the same on different inputs, in turn, so that no input is in a
    cache.

    On a GPU all runs are captured into one CUDA graph, and replays of it are measured that are launched while the
    device is still busy, so that the device is measured and not the host. There are at least three rounds, if so many
    are asked for, and no more than fit the budget. Raises whatever a run raises.

    sweep_bytes  if the inputs together do not fill the cache: bytes that are written before each run; the time of as
                 many sweeps without runs is subtracted
    """
    sweep: list[TimedRun] = []
    if sweep_bytes:
        buffer = torch.empty(sweep_bytes, dtype=torch.uint8, device=device)
        sweep = [buffer.zero_]
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
    """Return the timing of a run without a CUDA graph.

    The device must take longer for it than the host takes to launch it.
    """
    if device.type == "cuda":
        run()  # compiles kernels that are not compiled yet
        _warm_up_clocks(run, device)
        once = _timed_behind_warmup(run)
    else:
        once = _on_cpu([run], device)
    taken = [once() for _ in range(_rounds(once, rounds, budget_s))]
    _last_work_end[device] = time.perf_counter()
    return _timing(taken)


@dataclass(frozen=True, slots=True)
class InputRotation:
    """Method to keep inputs out of the cache: rotate so many copies, or with few copies sweep the cache before each
    run.

    `sweep_bytes` is 0 if the copies suffice.
    """

    copies: int
    sweep_bytes: int = 0

    @classmethod
    def past(cls, num_bytes: int, cache_bytes: int, limit: int) -> InputRotation:
        """Return the rotation for inputs of `num_bytes`, so that each has left the cache before its turn comes again.

        `limit` is the largest number of copies that can be made.
        """
        wanted = max(2, -(-4 * cache_bytes // max(1, num_bytes)))
        return cls(wanted) if wanted <= limit else cls(_SWEPT_COPIES, 2 * cache_bytes)


def _rounds(once: Callable[[], float], limit: int, budget_s: float) -> int:
    """Number of rounds that fit the budget; `once` is called once to measure a round."""
    began = time.perf_counter()
    once()
    spent = max(time.perf_counter() - began, 1e-7)
    return max(min(3, limit), min(limit, int(budget_s / spent)))


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
    """Return a function that measures the seconds of all runs once, by a CUDA graph.

    A graph that would end before the next is launched contains the runs several times.
    """
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for run in runs:  # compiles kernels that are not compiled yet, which must not happen in a capture
            run()
    torch.cuda.synchronize(device)
    graph, turns = _lengthen_graph(_capture_graph(runs, stream), 1, runs, stream)
    _warm_up_clocks(graph.replay, device)
    graph, turns = _lengthen_graph(graph, turns, runs, stream)  # again, since the clocks were slower before
    each = _timed_behind_warmup(graph.replay)
    each()
    return lambda: each() / turns


def _lengthen_graph(graph: Any, turns: int, runs: Sequence[TimedRun], stream: Any) -> tuple[Any, int]:
    """Return a graph that lasts long enough, and how many times it contains the runs; `graph` contains them `turns`
    times.
    """
    took = max(_timed_behind_warmup(graph.replay)(), 1e-9)
    wanted = min(_MAX_TURNS, math.ceil(turns * _LONG_S / took))
    return (graph, turns) if wanted <= turns else (_capture_graph([*runs] * wanted, stream), wanted)


def _capture_graph(runs: Sequence[TimedRun], stream: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    return graph


def _warm_up_clocks(run: TimedRun, device: torch.device) -> None:
    """Run until the device's clocks have risen.

    It takes as long as the device was idle since the last measurement, but no longer than clocks need to rise.
    """
    now = time.perf_counter()
    until = now + min(_WARM_S, now - _last_work_end.get(device, -math.inf))
    while time.perf_counter() < until:
        for _ in range(_REPLAYS):
            run()
        torch.cuda.synchronize(device)


def _timed_behind_warmup(run: TimedRun) -> Callable[[], float]:
    """Return a function that measures the seconds of one run, of several that wait in the stream behind an unmeasured
    one.

    The first run covers the time from the host to an idle device; the others find the device busy.
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
