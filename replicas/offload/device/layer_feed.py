"""Copies of offloaded layers to two buffers on the device: one layer ahead, while others compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ...execution.copier import Copier, DeviceEvent
from ..disk.layer_prefetch import NUM_BUFFERS, LayerPrefetcher
from .pinned_memory import allocate_page_aligned


class LayerByteSource(Protocol):
    """Protocol of memory that layers are copied from, which the device can read by itself."""

    def ready(self, layer: int) -> bool:
        """Return whether the layer is in pinned memory already, so that `take` would neither wait nor raise."""
        ...

    def take(self, layer: int) -> tuple[Sequence[torch.Tensor], Callable[[DeviceEvent], None]]:
        """Return the layer as uint8 pieces, one after the other, and a function to be called with the mark of their
        copy's end.

        Until the copy has ended the pieces stay as they are. May wait for a disk, but never for the device. Raises
        EngineFault.
        """
        ...


class _PendingCopy(NamedTuple):
    layer: int
    buffer: int
    there: DeviceEvent


class LayerFeed:
    """Order of copies and steps on the device, used by the thread that submits work to it. That thread never waits for
    the device: marks order copies and steps.

        computes | layer 2, in buffer 0 | layers that stay | layer 5, in buffer 1 | ...
        copies   | 5 into buffer 1 ---->| 8 into buffer 0 ------>                 | 11 into buffer 1 ...

        a layer  computes after its copy
        a copy   begins after all that was submitted before its buffer was released

    The last layer is followed by the first of the next step. A copy is submitted as soon as a buffer is released,
    unless the layer must still be read from disk: then it is submitted when the layer is needed.
    """

    def __init__(
        self,
        copier: Copier,
        layers: Sequence[int],
        sources: Mapping[int, LayerByteSource],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """Begin with copies of the first layers.

        layers   offloaded layers in the order of a step
        sources  memory that each layer is copied from
        buffers  uint8 tensors on the device
        """
        self._copier, self._sources, self._buffers = copier, sources, buffers
        self._after = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        fresh = copier.mark()  # work submitted before may still use the memory of the buffers
        self._free: deque[tuple[int, DeviceEvent | None]] = deque((number, fresh) for number in range(len(buffers)))
        self._on_way: deque[_PendingCopy] = deque()
        self._next = layers[0]

    def bring(self, layer: int) -> int:
        """Return the buffer that has the layer for all work submitted from now until `release`. Raises EngineFault."""
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
            self._free.append((buffer, None))  # nothing was submitted that reads it
            raise
        return buffer

    def release(self, buffer: int) -> None:
        """Release a buffer for the next layer: what was submitted until now is all that reads the present one."""
        self._free.append((buffer, self._copier.mark()))
        self._send_ready()

    def stop(self) -> None:
        """Wait for copies of layers in flight, when nothing is computed with them any more."""
        for each in self._on_way:
            each.there.wait()
        self._drop()

    def _drop(self) -> None:
        """Free all buffers after a failed step. Copies run one after the other, so that those in flight need no
        mark.
        """
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
            there = self._copier.copy(partial(copy_pieces, self._buffers[buffer], pieces), left)
        except BaseException:
            self._free.appendleft((buffer, left))
            taken(self._copier.copy(_nothing))  # its mark comes after whatever part of the copy had begun
            raise
        taken(there)
        self._on_way.append(_PendingCopy(layer, buffer, there))
        self._next = self._after[layer]


class PinnedLayerSource:
    """Source of layers that stay pinned in the host's memory, in pieces. Implements `LayerByteSource`."""

    def __init__(self, pieces: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self._pieces = pieces

    def ready(self, layer: int) -> bool:
        return True

    def take(self, layer: int) -> tuple[Sequence[torch.Tensor], Callable[[DeviceEvent], None]]:
        return self._pieces[layer], _ignore_event


class DiskLayerSource:
    """Source of layers that a thread of its own reads ahead from disk into two pinned buffers of the host. Implements
    `LayerByteSource`.
    """

    def __init__(
        self, copier: Copier, layers: Sequence[int], read: Callable[[int, memoryview], tuple[int, int]], size: int
    ) -> None:
        """Allocate the buffers and begin to read. Raises RuntimeError where the host does not pin that much memory.

        read  reads a layer into memory, and returns where in it the layer then begins and ends
        size  bytes of each buffer, whole pages
        """
        self._read = read
        self._memory = [allocate_page_aligned(copier, size) for _ in range(NUM_BUFFERS)]
        self._views = [memory.numpy().data for memory in self._memory]
        self._has = [(0, 0)] * NUM_BUFFERS
        self._copied: list[DeviceEvent | None] = [None] * NUM_BUFFERS
        self.ahead = LayerPrefetcher(layers, self._fill)

    def ready(self, layer: int) -> bool:
        return self.ahead.has(layer)

    def take(self, layer: int) -> tuple[Sequence[torch.Tensor], Callable[[DeviceEvent], None]]:
        buffer = self.ahead.take(layer)
        begin, end = self._has[buffer]
        return [self._memory[buffer][begin:end]], partial(self._taken, buffer)

    def memory(self, nbytes: int) -> Sequence[torch.Tensor]:
        """Return the first `nbytes` bytes of a pinned buffer, whatever they hold, for measuring copies."""
        return [self._memory[0][:nbytes]]

    def close(self) -> None:
        self.ahead.close()

    def _taken(self, buffer: int, copied: DeviceEvent) -> None:
        self._copied[buffer] = copied
        self.ahead.give(buffer)

    def _fill(self, layer: int, buffer: int) -> None:
        """Read a layer into a buffer. Runs in the reading thread, which alone waits until the device has copied the
        buffer's previous contents.
        """
        if (copied := self._copied[buffer]) is not None:
            copied.wait()
        self._has[buffer] = self._read(layer, self._views[buffer])


def copy_pieces(buffer: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy the pieces into the buffer one after the other, as work of the device."""
    at = 0
    for piece in pieces:
        buffer[at : at + len(piece)].copy_(piece, non_blocking=True)
        at += len(piece)


def _nothing() -> None:
    return None


def _ignore_event(mark: DeviceEvent) -> None:
    return None
