"""The first rank of a model that is divided among GPUs: its model and its accelerator, in the form that the runner of
one GPU takes.

All ranks make the same exchanges in the same order: each call, each capture of a CUDA graph, and each launch of one is
sent to the others just before it is made here. Tokens are sampled by the first rank alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ....kernels.batch import StepBatch
from ...errors import EngineLost
from ...execution.copier import DeviceEvent
from ...gpu.accelerator import Accelerator
from ...model.decoder import Decoder
from ..calls import device_calls
from ..transport.collective import CollectiveExchange
from .follower_group import FollowerGroup

T = TypeVar("T")


class CaptureAnnouncer:
    """State of the capture of a call, shared by all versions of the weights. A captured call is made twice but sent to
    the other ranks once.
    """

    def __init__(self) -> None:
        self._unsent_fields: dict[str, Any] | None = None
        self._on = False

    @contextmanager
    def of(self, fields: dict[str, Any]) -> Iterator[None]:
        """Context manager inside which the call that is made is one to be captured.

        fields  sent to the other ranks with that call
        """
        self._unsent_fields, self._on = fields, True
        try:
            yield
        finally:
            self._unsent_fields, self._on = None, False

    def take_fields(self) -> dict[str, Any] | None:
        """Return the fields to be sent with the current call; None if it has been sent already."""
        if self._on and self._unsent_fields is None:
            return None
        fields, self._unsent_fields = self._unsent_fields or {}, None
        return fields


class GpuTensorParallelLeader:
    """Model of all tensor-parallel ranks on GPUs. Its calls are work of an accelerator, and raise EngineLost.

    version    version of its weights
    capturing  state of captures, shared by all versions
    """

    def __init__(
        self, decoder: Decoder, group: FollowerGroup, version: int = 0, capturing: CaptureAnnouncer | None = None
    ) -> None:
        assert group.ranks is not None
        assert isinstance(group.ranks.exchange, CollectiveExchange)
        self._decoder, self._group, self._exchange = decoder, group, group.ranks.exchange
        self._version, self.capturing = version, capturing or CaptureAnnouncer()

    def renewed(self, decoder: Decoder, version: int) -> GpuTensorParallelLeader:
        """Return the same model with the weights of `version`, of which `decoder` has this rank's part."""
        return GpuTensorParallelLeader(decoder, self._group, version, self.capturing)

    def forget(self) -> None:
        """Drop this version of the weights in the other ranks: no call is made with it any more, and no graph of it is
        launched.
        """
        self._group.forget(self._version)

    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self._together("forward", batch, kv)

    def hidden(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self._together("hidden", batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._together("logits", hidden)

    def _together(self, method: str, argument: StepBatch | torch.Tensor, *kv: list[torch.Tensor]) -> torch.Tensor:
        try:
            if (capture := self.capturing.take_fields()) is not None:
                self._group.broadcast({**device_calls.call_fields(method, argument, self._version), **capture})
            device_calls.send_call(argument, self._exchange)
            found: torch.Tensor = getattr(self._decoder, method)(argument, *kv)
        except Exception as error:  # of any kind: the other ranks are in the middle of a step that cannot end
            raise _rank_lost_error(self._group, error) from error
        return found


class GuardedAccelerator:
    """Accelerator of the first process that raises EngineLost in waits for work in which a lost process takes part."""

    def __init__(self, accelerator: Accelerator, group: FollowerGroup) -> None:
        self._accelerator, self._group = accelerator, group
        self.device, self.apart = accelerator.device, accelerator.apart

    def staging(self, size: int) -> torch.Tensor:
        return self._accelerator.staging(size)

    def pin(self, memory: torch.Tensor) -> None:
        self._accelerator.pin(memory)

    def trim(self) -> None:
        self._accelerator.trim()

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        return self._accelerator.moved(values)

    def submit(self, work: Callable[[], None]) -> None:
        self._accelerator.submit(work)

    def mark(self) -> DeviceEvent:
        return _GuardedEvent(self._accelerator.mark(), self._group)

    def copy(self, work: Callable[[], None], after: DeviceEvent | None = None) -> DeviceEvent:
        raise NotImplementedError("a swapper has been given the accelerator itself")

    def follow(self, mark: DeviceEvent) -> None:
        raise NotImplementedError("a swapper has been given the accelerator itself")

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise NotImplementedError("calls of pipeline stages are not captured")

    def free_graphs(self) -> None:
        self._accelerator.free_graphs()

    def aside(self, work: Callable[[], T]) -> tuple[T, DeviceEvent]:
        return self._accelerator.aside(work)  # no other rank takes part in this work

    def free_bytes(self) -> int:
        return self._accelerator.free_bytes()


class SynchronizedAccelerator(GuardedAccelerator):
    """Accelerator whose captured graphs are captured by every rank, and launched by every rank when they are launched
    here.

    A rank that cannot capture ends all ranks.
    """

    def __init__(self, accelerator: Accelerator, group: FollowerGroup, lead: GpuTensorParallelLeader) -> None:
        super().__init__(accelerator, group)
        self._capturing = lead.capturing
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work`, which makes one call of a `GpuTensorParallelLeader` with weights of any version, and return
        what launches the graph.
        """
        group, number = self._group, next(self._numbers)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self.mark().wait()  # the calls in flight have been sent before
        try:
            with self._capturing.of({"capture": number, "drop": dropped}):
                replay = self._accelerator.capture(work)
        except Exception as error:
            raise _rank_lost_error(group, error, "a rank could not capture a CUDA graph that all ranks need") from error
        self.mark().wait()  # its first run ends when all ranks have run it; captures are rare enough to wait

        def launch() -> None:
            group.broadcast({"replay": number})
            replay()

        # The number of a graph that is freed here is sent to the others with the next capture, since only captures
        # make graphs be freed, or else they free it with its weights.
        weakref.finalize(launch, self._dropped.append, number).atexit = False
        return launch


class _GuardedEvent:
    def __init__(self, mark: DeviceEvent, group: FollowerGroup) -> None:
        self._mark, self._group = mark, group

    def wait(self) -> None:
        """Wait for the work. Raises EngineLost when a process is lost, since an aborted exchange gives meaningless
        results.
        """
        try:
            with self._group.waiting_for_followers():
                self._mark.wait()
        except Exception as error:
            raise _rank_lost_error(self._group, error) from error
        self._group.check()


def _rank_lost_error(
    group: FollowerGroup, error: Exception, what: str = "the processes of the model cannot go on"
) -> EngineLost:
    fault = group.end(error)
    return fault if isinstance(fault, EngineLost) else EngineLost(f"{what}: {fault}")
