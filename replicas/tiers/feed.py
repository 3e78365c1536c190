"""Layers that are not on a device, brought into two buffers there: one ahead, while others compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ..gpu.accelerator import Copier, Mark
from .ahead import BUFFERS, Ahead
from .pinned import aligned

__all__ = ["Feed", "FromDisk", "Resting", "Source", "fill"]


class Source(Protocol):
    """Where the bytes of layers are copied from, in memory that the device reads by itself."""

    def ready(self, layer: int) -> bool:
        """Whether `take` would not wait, nor raise."""
        ...

    def take(self, layer: int) -> tuple[Sequence[torch.Tensor], Callable[[Mark], None]]:
        """Pieces uint8 that are the layer, one after the other; and what is to be told the end of the copy of them.

        Until then they stay as they are. May wait, for a disk and not for the device. Raises EngineFault.
        """
        ...


class _OnItsWay(NamedTuple):
    layer: int
    buffer: int
    there: Mark


class Feed:
    """Used by the thread that submits work to the device, which it never waits for: marks order copies and steps.

        computes | layer 2, in buffer 0 | layers that stay | layer 5, in buffer 1 | ...
        copies   | 5 into buffer 1 ---->| 8 into buffer 0 ------>                 | 11 into buffer 1 ...

        a layer  comes after the copy of it
        a copy   comes after all that was submitted when its buffer was left

    The last layer is followed by the first, of the next step. A copy is submitted as soon as its buffer is left; one
    that still waits for the disk, when it is wanted.
    """

    def __init__(
        self, copier: Copier, layers: Sequence[int], sources: Mapping[int, Source], buffers: Sequence[torch.Tensor]
    ) -> None:
        """
        layers   in the order of a step
        sources  of each
        buffers  uint8, on the device
        """
        self._copier, self._sources, self._buffers = copier, sources, buffers
        self._after = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        fresh = copier.mark()  # of memory that work before it may have had
        self._free: deque[tuple[int, Mark | None]] = deque((number, fresh) for number in range(len(buffers)))
        self._on_way: deque[_OnItsWay] = deque()
        self._next = layers[0]

    def bring(self, layer: int) -> int:
        """The buffer that has it, for what is submitted from now on, until `leave`. Raises EngineFault."""
        if self._on_way and self._on_way[0].layer != layer:
            self._drop()
        if not self._on_way:
            self._next = layer
            self._send()
        _, buffer, there = self._on_way[0]
        self._copier.follow(there)
        self._on_way.popleft()
        try:
            self._send_ready()
        except BaseException:
            self._free.append((buffer, None))  # nothing has come to read it
            raise
        return buffer

    def leave(self, buffer: int) -> None:
        """What was submitted until now is all that reads it."""
        self._free.append((buffer, self._copier.mark()))
        self._send_ready()

    def stop(self) -> None:
        """Once nothing is computed any more: no copy is on its way."""
        for each in self._on_way:
            each.there.wait()
        self._drop()

    def _drop(self) -> None:
        """A step has failed. Copies come one after the other: what was on its way needs no mark."""
        self._free += [(each.buffer, None) for each in self._on_way]
        self._on_way.clear()

    def _send_ready(self) -> None:
        while self._free and self._sources[self._next].ready(self._next):
            self._send()

    def _send(self) -> None:
        layer = self._next
        pieces, taken = self._sources[layer].take(layer)
        buffer, left = self._free.popleft()
        try:
            there = self._copier.copy(partial(fill, self._buffers[buffer], pieces), left)
        except BaseException:
            self._free.appendleft((buffer, left))
            taken(self._copier.copy(_nothing))  # after whatever of it had begun
            raise
        taken(there)
        self._on_way.append(_OnItsWay(layer, buffer, there))
        self._next = self._after[layer]


class Resting:
    """Implements `Source`: layers that stay in the host's memory, by their pieces."""

    def __init__(self, pieces: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self._pieces = pieces

    def ready(self, layer: int) -> bool:
        return True

    def take(self, layer: int) -> tuple[Sequence[torch.Tensor], Callable[[Mark], None]]:
        return self._pieces[layer], _unheard


class FromDisk:
    """Implements `Source`: layers that are read ahead, by a thread of its own, into two buffers of the host."""

    def __init__(
        self, copier: Copier, layers: Sequence[int], read: Callable[[int, memoryview], tuple[int, int]], size: int
    ) -> None:
        """read(layer, memory): from where to where in it the layer is then. size: bytes of each buffer, whole pages.

        Raises RuntimeError where the host does not pin so much.
        """
        self._read = read
        self._memory = [aligned(copier, size) for _ in range(BUFFERS)]
        self._views = [memory.numpy().data for memory in self._memory]
        self._has = [(0, 0)] * BUFFERS
        self._copied: list[Mark | None] = [None] * BUFFERS
        self.ahead = Ahead(layers, self._fill)

    def ready(self, layer: int) -> bool:
        return self.ahead.has(layer)

    def take(self, layer: int) -> tuple[Sequence[torch.Tensor], Callable[[Mark], None]]:
        buffer = self.ahead.take(layer)
        begin, end = self._has[buffer]
        return [self._memory[buffer][begin:end]], partial(self._taken, buffer)

    def memory(self, nbytes: int) -> Sequence[torch.Tensor]:
        """So many bytes of a buffer, whatever they are."""
        return [self._memory[0][:nbytes]]

    def close(self) -> None:
        self.ahead.close()

    def _taken(self, buffer: int, copied: Mark) -> None:
        self._copied[buffer] = copied
        self.ahead.give(buffer)

    def _fill(self, layer: int, buffer: int) -> None:
        """In the thread that reads: it is this one that waits until the device has what the buffer held."""
        if (copied := self._copied[buffer]) is not None:
            copied.wait()
        self._has[buffer] = self._read(layer, self._views[buffer])


def fill(buffer: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Work: the pieces one after the other."""
    at = 0
    for piece in pieces:
        buffer[at : at + len(piece)].copy_(piece, non_blocking=True)
        at += len(piece)


def _nothing() -> None:
    return None


def _unheard(mark: Mark) -> None:
    return None
