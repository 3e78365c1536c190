"""Reader of layers from disk, one ahead: while a layer in one of two buffers computes, the next is read into the
other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

NUM_BUFFERS = 2


class _PendingRead(NamedTuple):
    layer: int
    buffer: int
    done: Future[None]


class LayerPrefetcher:
    """Two buffers of layers, used by the one thread that computes, while another thread reads.

        computes   | layer 2, in buffer 0 | layers in memory | layer 5, in buffer 1 | ...
        reads      | 5 into buffer 1 ---->| 8 into buffer 0 -|-->                   | 11 into buffer 1 ...

    The last layer is followed by the first of the next step.
    """

    def __init__(self, layers: Sequence[int], read: Callable[[int, int], None]) -> None:
        """Begin to read the first layers.

        layers  layers on disk, in the order of a step
        read    reads a layer into a buffer, by their numbers; called in a thread of its own, once at a time
        """
        self._read = read
        self._after = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        self._reader = ThreadPoolExecutor(1, "weights reader")
        self._free = list(range(NUM_BUFFERS))
        self._on_way: deque[_PendingRead] = deque()
        self._next = layers[0]
        self._fill()

    def take(self, layer: int) -> int:
        """Return the buffer that has the layer, which stays there until `give`. Raises what reading the layer
        raised.
        """
        if not self._on_way or self._on_way[0].layer != layer:  # the step before has failed, or this is the first
            self._settle()
            self._next = layer
            self._fill()
        _, buffer, done = self._on_way.popleft()
        try:
            done.result()
        except BaseException:
            self._free.append(buffer)
            raise
        return buffer

    def has(self, layer: int) -> bool:
        """Return whether a layer has been read from disk, so that `take` would neither wait nor raise."""
        if not self._on_way or self._on_way[0].layer != layer:
            return False
        done = self._on_way[0].done
        return done.done() and done.exception() is None

    def give(self, buffer: int) -> None:
        """Release a buffer whose layer has computed; the layer after the next is read into it."""
        self._free.append(buffer)
        self._fill()

    def alone(self, layer: int) -> int:
        """Read a layer while nothing computes and nothing else is read, and return the buffer that has it."""
        self._settle()
        buffer, self._next = self._free[0], layer
        self._reader.submit(self._read, layer, buffer).result()
        return buffer

    def close(self) -> None:
        """End the thread that reads layers from disk, after the read in progress."""
        self._reader.shutdown(cancel_futures=True)
        del self._read  # breaks a reference cycle, so that the buffers are freed at once

    def _settle(self) -> None:
        """Wait for reads of layers in progress, and free all buffers."""
        wait([each.done for each in self._on_way])
        self._free += [each.buffer for each in self._on_way]
        self._on_way.clear()

    def _fill(self) -> None:
        while self._free:
            buffer, layer = self._free.pop(0), self._next
            self._on_way.append(_PendingRead(layer, buffer, self._reader.submit(self._read, layer, buffer)))
            self._next = self._after[layer]
