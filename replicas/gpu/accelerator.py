"""Interface of a device that computes asynchronously, in the order in which work is submitted; for GPUs and CPUs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch

from ..execution.copier import Copier, DeviceEvent

log = logging.getLogger(__name__)

T = TypeVar("T")


class Accelerator(Copier, Protocol):
    """Protocol of a device. Submitted work must not wait for the device, as `.item()` does."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run work on the device after all that was submitted before."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of `work` as one, and return a function that launches it, to be submitted any number of
        times.

        Each launch reads and writes the same memory, and uses the same host numbers. `work` is run once before, to
        compile what it needs, and once to be recorded.
        """
        ...

    def free_graphs(self) -> None:
        """Free what `capture` recorded, whoever refers to it. None of it may be running or be launched again."""
        ...

    def aside(self, work: Callable[[], T]) -> tuple[T, DeviceEvent]:
        """Run `work` beside all that is submitted, in memory of its own, and return its result and a mark of when that
        is there.

        May be called from any thread. `work` may wait for the device; it must not read what submitted work still
        writes.
        """
        ...

    def free_bytes(self) -> int:
        """Return the free bytes of the device's memory, after unused cached memory was released. From any thread."""
        ...


class CudaAccelerator:
    """NVIDIA GPU. Work runs on its current stream, copies on a stream of their own, and work aside on another.

    Every call sets the device, since each thread has a current device of its own.
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
        self._capturing = threading.Lock()  # no thread may release memory during a capture

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            error = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(error):
            log.warning(
                "memory shared by processes could not be pinned and is copied more slowly: CUDA error %d", int(error)
            )
            with suppress(RuntimeError):  # else the next launch, of whatever work, would raise this error
                torch.zeros(1, device=self.device)

    def trim(self) -> None:
        """Free pinned memory that torch caches; how to do that differs by torch's version."""
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

    def mark(self) -> DeviceEvent:
        with torch.cuda.device(self.device):
            return _CudaEvent()

    @torch.inference_mode()
    def copy(self, work: Callable[[], None], after: DeviceEvent | None = None) -> DeviceEvent:
        with torch.cuda.device(self.device), torch.cuda.stream(self._copies):
            if after is not None:
                self.follow(after)
            work()
            return _CudaEvent()

    def follow(self, mark: DeviceEvent) -> None:
        assert isinstance(mark, _CudaEvent)
        mark.hold_up(torch.cuda.current_stream(self.device))

    @torch.inference_mode()
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with self._capturing, torch.cuda.device(self.device):
            return self._capture(work)

    def free_graphs(self) -> None:
        with torch.cuda.device(self.device):
            for graph in list(self._graphs):
                graph.reset()

    def aside(self, work: Callable[[], T]) -> tuple[T, DeviceEvent]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._aside):
            return work(), _CudaEvent()

    def free_bytes(self) -> int:
        with self._capturing, torch.cuda.device(self.device):
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0]

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        side = self._captures
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        if not self._graphs:  # torch may still hold the memory of graphs that are gone, and then asserts on that pool
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        # Other threads may use the device too: only this thread's calls are recorded.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


def open_accelerator(device: torch.device) -> Accelerator | None:
    """Return the accelerator of a GPU; None for a CPU."""
    return CudaAccelerator(device) if device.type == "cuda" else None


def copy_to_host(values: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host. The copy is there when what was submitted before the next mark is done."""
    if values.device.type == "cpu":
        return values.clone()
    target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return target.copy_(values, non_blocking=True)
