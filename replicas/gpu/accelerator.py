"""What the runner asks of a device that computes by itself, in the order of what it is given."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")


class Mark(Protocol):
    """A place in the order of work."""

    def wait(self) -> None:
        """Until all that was submitted before it is done. Raises what that has raised, if it was not known before."""
        ...


class Copier(Protocol):
    """What copies KV beside the work of a device. Work runs in torch's inference mode.

    apart  the device has memory of its own, which the host's processor does not reach
    """

    device: torch.device
    apart: bool

    def staging(self, size: int) -> torch.Tensor:
        """uint8 [size] of the host, which the device reads and writes by itself."""
        ...

    def pin(self, memory: torch.Tensor) -> None:
        """uint8, of the host, which other processes may have too: the device reads and writes it by itself from now on.

        It is to stay for as long as the process. Where it cannot be pinned copies are slower, and the log says so.
        """
        ...

    def trim(self) -> None:
        """Give the host back what `staging` gave and nobody has any more."""
        ...

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the device, part of the work that is being submitted. The host's may be dropped at once."""
        ...

    def mark(self) -> Mark: ...

    def copy(self, work: Callable[[], None], after: Mark | None = None) -> Mark:
        """To be done beside what is submitted: after all that was given to `copy` before, and after that mark.

        The mark that it gives is of its end.
        """
        ...

    def follow(self, mark: Mark) -> None:
        """What is submitted from now on is done after that mark, of a copy."""
        ...


class Accelerator(Copier, Protocol):
    """A device. Nothing that is submitted may wait for the device, as `.item()` does."""

    def submit(self, work: Callable[[], None]) -> None:
        """To be done after all that was submitted before."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of `work` as one, which is given back to be submitted, as often as one likes.

        They read and write the same memory each time, and host numbers are as they were. `work` is run once before,
        to compile what it needs, and once to be recorded.
        """
        ...

    def aside(self, work: Callable[[], T]) -> tuple[T, Mark]:
        """What `work` makes beside all that is submitted, in memory of its own, and the mark of when that is there.

        From any thread. `work` may wait for the device; it reads nothing that what is submitted still writes.
        """
        ...

    def room(self) -> int:
        """Bytes of its memory that are free, once what is kept for nobody is given back. From any thread."""
        ...


class Cuda:
    """A GPU of NVIDIA's, on its current stream; copies on one of their own, and what is made aside on another.

    Whichever thread calls: each has a current device of its own.
    """

    apart = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # One for all captures: cuBLAS keeps a workspace for every stream that it was ever called on.
        self._captures = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._capturing = threading.Lock()  # nobody may give memory back meanwhile

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            error = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(error):
            log.warning("memory that processes share is not pinned, and copied more slowly: CUDA error %d", int(error))
            with suppress(RuntimeError):  # else the next that is launched is told of this error, whatever it is
                torch.zeros(1, device=self.device)

    def trim(self) -> None:
        """torch keeps pinned memory for itself until it is told; how, differs by its version."""
        public = getattr(torch.accelerator, "empty_host_cache", None)
        empty = public or getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()

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
    def copy(self, work: Callable[[], None], after: Mark | None = None) -> Mark:
        with torch.cuda.device(self.device), torch.cuda.stream(self._copies):
            if after is not None:
                self.follow(after)
            work()
            return _Event()

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, _Event)
        mark.hold_up(torch.cuda.current_stream(self.device))

    @torch.inference_mode()
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with self._capturing, torch.cuda.device(self.device):
            return self._capture(work)

    def aside(self, work: Callable[[], T]) -> tuple[T, Mark]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._aside):
            return work(), _Event()

    def room(self) -> int:
        with self._capturing, torch.cuda.device(self.device):
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0]

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        side = self._captures
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        if not self._graphs:  # torch may not have taken back yet what graphs had that have all gone: there it asserts
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may be at work on the device too: only this one's calls are recorded.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            work()
        self._graphs.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay


class _Event:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class AtOnce:
    """A CPU, which has done what it is given when the call returns."""

    device = torch.device("cpu")
    apart = False

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        return None

    def trim(self) -> None:
        return None

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def mark(self) -> Mark:
        return _Done()

    @torch.inference_mode()
    def copy(self, work: Callable[[], None], after: Mark | None = None) -> Mark:
        work()
        return _Done()

    def follow(self, mark: Mark) -> None:
        return None


class _Done:
    def wait(self) -> None:
        return None


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Of a GPU; a CPU has none."""
    return Cuda(device) if device.type == "cuda" else None


def to_host(values: torch.Tensor) -> torch.Tensor:
    """On its way when this returns, there when what was submitted before the next mark is done."""
    if values.device.type == "cpu":
        return values.clone()
    target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return target.copy_(values, non_blocking=True)
