"""What the runner asks of a device that computes by itself, in the order of what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the order of work."""

    def wait(self) -> None:
        """Until all that was submitted before it is done. Raises what that has raised, if it was not known before."""
        ...


class Accelerator(Protocol):
    """A device. Work runs in torch's inference mode, and nothing in it may wait for the device, as `.item()` does."""

    device: torch.device

    def staging(self, size: int) -> torch.Tensor:
        """uint8 [size] of the host, which the device reads and writes by itself."""
        ...

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the device, part of the work that is being submitted. The host's may be dropped at once."""
        ...

    def submit(self, work: Callable[[], None]) -> None:
        """To be done after all that was submitted before."""
        ...

    def mark(self) -> Mark: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of `work` as one, which is given back to be submitted, as often as one likes.

        They read and write the same memory each time, and host numbers are as they were. `work` is run once before,
        to compile what it needs, and once to be recorded.
        """
        ...


class Cuda:
    """A GPU of NVIDIA's, on its current stream. Whichever thread calls: each has a current device of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        return values.pin_memory().to(self.device, non_blocking=True)

    @torch.inference_mode()
    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self.device):
            work()

    def mark(self) -> Mark:
        with torch.cuda.device(self.device):
            return _Event()

    @torch.inference_mode()
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self.device):
            return self._capture(work)

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # The event loop's thread may be at work on the device too: only this one's calls are recorded.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay


class _Event:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()
