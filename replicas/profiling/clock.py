"""The one clock of a profile: the host's for a CPU, events on the stream for a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["Clock", "HostClock", "StreamClock", "clock_of"]

Mark = Any  # a moment, as one clock knows it

# Of a hold, at first: a quarter of a millisecond or more, several times what the host takes to launch one module.
_CYCLES, _MOST_CYCLES = 2**19, 2**26


class Clock(Protocol):
    def mark(self) -> Mark:
        """This moment, in the order of the device's work."""
        ...

    def seconds(self, began: Mark, ended: Mark) -> float:
        """Between two marks that have `settle`d."""
        ...

    def settle(self) -> None:
        """Wait until the device has passed all marks."""
        ...

    def leave_out_since(self, mark: Mark) -> None:
        """What the profiler itself has done since then is no part of the step."""
        ...

    def hold(self, times: int = 1) -> None:
        """Keep the device from beginning what comes next until it has been given it. The wait is in no time."""
        ...


class HostClock:
    """Marks are seconds on a time line in which the profiler's own work takes none."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._left_out = now, 0.0

    def mark(self) -> float:
        return self._now() - self._left_out

    def seconds(self, began: float, ended: float) -> float:
        return ended - began

    def settle(self) -> None:
        pass

    def leave_out_since(self, mark: float) -> None:
        self._left_out += self.mark() - mark

    def hold(self, times: int = 1) -> None:
        pass


class _Moment(NamedTuple):
    """holds: those before it."""

    event: Any
    holds: int


class StreamClock:
    """Marks are events of CUDA's current stream. What the host does meanwhile shows only where the stream waits.

    A kernel of few microseconds is done long before the host has launched the next: between two marks would be the
    time of launching it. So the stream is held, by a kernel that counts cycles, until what is timed is in the queue.
    A hold that was too short is seen by the next one, which finds the stream idle: from then on they are twice as long.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._holds: list[tuple[Any, Any]] = []  # events before and after each
        self._cycles = _CYCLES
        self._last: Any = None  # event, since the host last waited

    def mark(self) -> _Moment:
        return _Moment(self._event(), len(self._holds))

    def seconds(self, began: _Moment, ended: _Moment) -> float:
        held = sum(before.elapsed_time(after) for before, after in self._holds[began.holds : ended.holds])
        return float(began.event.elapsed_time(ended.event) - held) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        self._last = None

    def leave_out_since(self, mark: _Moment) -> None:
        pass

    def hold(self, times: int = 1) -> None:
        if self._last is not None and self._last.query():
            self._cycles = min(2 * self._cycles, _MOST_CYCLES)
        before = self._event()
        torch.cuda._sleep(times * self._cycles)  # type: ignore[no-untyped-call]
        self._holds.append((before, self._event()))

    def _event(self) -> Any:
        self._last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._last.record()
        return self._last


def clock_of(device: torch.device) -> Clock:
    return StreamClock(device) if device.type == "cuda" else HostClock()
