"""The one clock of a profile: the host's for a CPU, events on the stream for a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["Clock", "HostClock", "StreamClock", "clock_of"]

Mark = Any  # a moment, as one clock knows it


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


class StreamClock:
    """Marks are events of CUDA's current stream. What the host does meanwhile shows only where the stream waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def leave_out_since(self, mark: Any) -> None:
        pass


def clock_of(device: torch.device) -> Clock:
    return StreamClock(device) if device.type == "cuda" else HostClock()
