"""A GPU in virtual time, as far as measuring goes: launches take their way, work waits in a stream, clocks rise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from motley.kernels.tuning import timing

__all__ = ["FakeGpu"]


class FakeGpu:
    """Seconds of host and device. What is submitted starts when the device is free and the launch has reached it.

    submit_s   of the host for each launch
    latency_s  from the host to an idle device
    rise_s     so long the device must have worked, since it was idle for as long, before its clocks are at their most
    slow       how many times longer work takes until then
    """

    def __init__(
        self, submit_s: float = 5e-6, latency_s: float = 20e-6, rise_s: float = 0.25, slow: float = 5.0
    ) -> None:
        self._submit_s, self._latency_s, self._rise_s, self._slow = submit_s, latency_s, rise_s, slow
        self.now = 1000.0
        self._free, self._worked = 0.0, 0.0
        self._captured: list[float] | None = None
        self.launches = 0

    def run(self, seconds: float) -> Callable[[], None]:
        """Something that takes the device so long at its full clocks."""

        def launch() -> None:
            if self._captured is not None:
                self._captured.append(seconds)
            else:
                self._submit([seconds])

        return launch

    @contextmanager
    def installed(self) -> Iterator[None]:
        cuda = SimpleNamespace(
            Stream=lambda device: None,
            stream=lambda stream: nullcontext(),
            synchronize=lambda device=None: self._wait(self._free),
            CUDAGraph=lambda: _Graph(self),
            graph=self._capture,
            Event=lambda enable_timing: _Event(self),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timing.torch, "cuda", cuda)
            patch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))
            patch.setattr(timing, "_last_work_end", {}, raising=False)
            yield

    def idle(self, seconds: float) -> None:
        """The host does something else."""
        self._wait(self.now + seconds)

    def _submit(self, works: list[float]) -> None:
        self.launches += 1
        self.now += self._submit_s
        if self._free + self._rise_s <= self.now:
            self._worked = 0.0
        at = max(self._free, self.now + self._latency_s)
        for work in works:
            spent = work if self._worked >= self._rise_s else work * self._slow
            self._worked += spent
            at += spent
        self._free = at

    @contextmanager
    def _capture(self, graph: _Graph, stream: Any = None) -> Iterator[None]:
        self._captured = graph.works
        yield
        self._captured = None

    def _wait(self, until: float) -> None:
        self.now = max(self.now, until)


class _Graph:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.works: list[float] = []

    def replay(self) -> None:
        self._gpu._submit(self.works)


class _Event:
    """Marks when the device has come to it; on an idle one that is when the host asks."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._at = 0.0

    def record(self) -> None:
        self._at = max(self._gpu.now, self._gpu._free)

    def synchronize(self) -> None:
        self._gpu._wait(self._at)

    def elapsed_time(self, other: _Event) -> float:
        return (other._at - self._at) * 1e3
