"""Clock of a profile: the host's for a CPU, events on the stream for a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

ClockMark = Any  # a moment in the form of one clock

# Cycles of a hold, at first and at most: a quarter of a millisecond or more, several times what a launch takes.
_CYCLES, _MAX_CYCLES = 2**19, 2**26


class StepClock(Protocol):
    def mark(self) -> ClockMark:
        """Mark this moment, in the order of the device's work."""
        ...

    def seconds(self, began: ClockMark, ended: ClockMark) -> float:
        """Return the seconds between two marks. `settle` must have been called after both."""
        ...

    def settle(self) -> None:
        """Wait until the device has passed all marks."""
        ...

    def exclude_since(self, mark: ClockMark) -> None:
        """Exclude the time since the mark, which the profiler itself has spent, from the step."""
        ...

    def hold(self, times: int = 1) -> None:
        """Keep the device from beginning the work that follows until all of it is queued. The wait counts in no
        measured time.
        """
        ...


class HostClock:
    """Clock of the host. Marks are seconds on a time line from which the profiler's own work is left out."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._left_out = now, 0.0

    def mark(self) -> float:
        return self._now() - self._left_out

    def seconds(self, began: float, ended: float) -> float:
        return ended - began

    def settle(self) -> None:
        pass

    def exclude_since(self, mark: float) -> None:
        self._left_out += self.mark() - mark

    def hold(self, times: int = 1) -> None:
        pass


class _StreamMoment(NamedTuple):
    """A mark on a stream. holds: the number of holds before it."""

    event: Any
    holds: int


class StreamClock:
    """Clock of CUDA's current stream; marks are events. What the host does meanwhile shows only where the stream waits.

    A kernel of a few microseconds is done long before the host has launched the next, so the time between two marks
    would be that of launching. So the stream is held, by a kernel that counts cycles, until the timed work is in the
    queue. If a hold was too short, the next one finds the stream idle, and from then on holds are twice as long.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._holds: list[tuple[Any, Any]] = []  # events before and after each hold
        self._cycles = _CYCLES
        self._last: Any = None  # the latest event since the host last waited

    def mark(self) -> _StreamMoment:
        return _StreamMoment(self._event(), len(self._holds))

    def seconds(self, began: _StreamMoment, ended: _StreamMoment) -> float:
        held = sum(before.elapsed_time(after) for before, after in self._holds[began.holds : ended.holds])
        return float(began.event.elapsed_time(ended.event) - held) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        self._last = None

    def exclude_since(self, mark: _StreamMoment) -> None:
        pass

    def hold(self, times: int = 1) -> None:
        if self._last is not None and self._last.query():
            self._cycles = min(2 * self._cycles, _MAX_CYCLES)
        before = self._event()
        torch.cuda._sleep(times * self._cycles)  # type: ignore[no-untyped-call]
        self._holds.append((before, self._event()))

    def _event(self) -> Any:
        self._last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._last.record()
        return self._last


def open_clock(device: torch.device) -> StepClock:
    return StreamClock(device) if device.type == "cuda" else HostClock()
