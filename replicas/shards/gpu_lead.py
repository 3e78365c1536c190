"""The first rank of a model that is divided among GPUs: its model and its accelerator, as the runner of one GPU wants
them. Followers are in gpu_follower.py.

All ranks make the same exchanges in the same order: each call, each capture of a graph, and each launch of one is told
to the others just before it is made here. Tokens are chosen here alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ...kernels.batch import StepBatch
from ..decoder import Decoder
from ..errors import EngineLost
from ..gpu.accelerator import Accelerator, Mark
from . import device_calls
from .collective import CollectiveExchange
from .group import Group

__all__ = ["GpuLead", "Guarded", "Together"]

T = TypeVar("T")


class Capturing:
    """Whether a call is being captured, whatever weights it is of. Such a call is made twice and told once."""

    def __init__(self) -> None:
        self._untold: dict[str, Any] | None = None
        self._on = False

    @contextmanager
    def of(self, fields: dict[str, Any]) -> Iterator[None]:
        """The call that is made meanwhile is one to be captured, of which `fields` are told."""
        self._untold, self._on = fields, True
        try:
            yield
        finally:
            self._untold, self._on = None, False

    def told(self) -> dict[str, Any] | None:
        """With the call that is made now; None: it was told before."""
        if self._on and self._untold is None:
            return None
        fields, self._untold = self._untold or {}, None
        return fields


class GpuLead:
    """The model of all ranks. Its calls are work of an accelerator. Raises EngineLost.

    version    of the weights that it has
    capturing  shared by all versions
    """

    def __init__(self, decoder: Decoder, group: Group, version: int = 0, capturing: Capturing | None = None) -> None:
        assert group.ranks is not None
        assert isinstance(group.ranks.exchange, CollectiveExchange)
        self._decoder, self._group, self._exchange = decoder, group, group.ranks.exchange
        self._version, self.capturing = version, capturing or Capturing()

    def renewed(self, decoder: Decoder, version: int) -> GpuLead:
        """With other weights."""
        return GpuLead(decoder, self._group, version, self.capturing)

    def forget(self) -> None:
        """Nothing is computed with it any more: no call, and no graph of one, is launched again."""
        self._group.forget(self._version)

    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self._together("forward", batch, kv)

    def hidden(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        return self._together("hidden", batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._together("logits", hidden)

    def _together(self, method: str, argument: StepBatch | torch.Tensor, *kv: list[torch.Tensor]) -> torch.Tensor:
        try:
            if (capture := self.capturing.told()) is not None:
                self._group.tell({**device_calls.called(method, argument, self._version), **capture})
            device_calls.send(argument, self._exchange)
            found: torch.Tensor = getattr(self._decoder, method)(argument, *kv)
        except Exception as error:  # whatever it is: the others are in the middle of a step that never ends
            raise _lost(self._group, error) from error
        return found


class Guarded:
    """An accelerator of the first process: whoever waits for work that others have a part in is told of their loss."""

    def __init__(self, accelerator: Accelerator, group: Group) -> None:
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

    def mark(self) -> Mark:
        return _Guarded(self._accelerator.mark(), self._group)

    def copy(self, work: Callable[[], None], after: Mark | None = None) -> Mark:
        raise NotImplementedError("a swapper has been given the accelerator itself")

    def follow(self, mark: Mark) -> None:
        raise NotImplementedError("a swapper has been given the accelerator itself")

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise NotImplementedError("stages are called, and captured are the calls of ranks alone")

    def aside(self, work: Callable[[], T]) -> tuple[T, Mark]:
        return self._accelerator.aside(work)  # no other rank has a part in it

    def room(self) -> int:
        return self._accelerator.room()


class Together(Guarded):
    """What it captures every rank captures, and launches when it is launched here. One that cannot ends all."""

    def __init__(self, accelerator: Accelerator, group: Group, lead: GpuLead) -> None:
        super().__init__(accelerator, group)
        self._capturing = lead.capturing
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` makes one call of a lead's, with weights of any version."""
        group, number = self._group, next(self._numbers)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self.mark().wait()  # the calls on their way are told before
        try:
            with self._capturing.of({"capture": number, "drop": dropped}):
                replay = self._accelerator.capture(work)
        except Exception as error:
            raise _lost(group, error, "no graph could be captured, as the other ranks have it") from error
        self.mark().wait()  # what was run of it ends when all ranks have run it: seldom is the time for that

        def launch() -> None:
            group.tell({"replay": number})
            replay()

        # Whoever lets go of it says nothing: the others hear of it with the next capture, which has made it necessary,
        # or of the weights that it was of.
        weakref.finalize(launch, self._dropped.append, number).atexit = False
        return launch


class _Guarded:
    def __init__(self, mark: Mark, group: Group) -> None:
        self._mark, self._group = mark, group

    def wait(self) -> None:
        """Raises EngineLost: of an exchange that was given up nonsense has come."""
        try:
            with self._group.waited_for():
                self._mark.wait()
        except Exception as error:
            raise _lost(self._group, error) from error
        self._group.check()


def _lost(group: Group, error: Exception, what: str = "the model is not whole any more") -> EngineLost:
    fault = group.end(error)
    return fault if isinstance(fault, EngineLost) else EngineLost(f"{what}: {fault}")
