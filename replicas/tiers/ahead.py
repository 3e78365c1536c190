"""Layers from disk, one ahead: while one computes in one of two buffers, the next is read into the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

__all__ = ["BUFFERS", "Ahead"]

BUFFERS = 2


class _OnItsWay(NamedTuple):
    layer: int
    buffer: int
    done: Future[None]


class Ahead:
    """Used by the one thread that computes; another reads.

        computes   | layer 2, in buffer 0 | layers in memory | layer 5, in buffer 1 | ...
        reads      | 5 into buffer 1 ---->| 8 into buffer 0 -|-->                   | 11 into buffer 1 ...

    The last layer is followed by the first, of the next step.
    """

    def __init__(self, layers: Sequence[int], read: Callable[[int, int], None]) -> None:
        """layers: in the order of a step. read(layer, buffer): in a thread of its own, one at a time."""
        self._read = read
        self._after = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        self._reader = ThreadPoolExecutor(1, "weights reader")
        self._free = list(range(BUFFERS))
        self._on_way: deque[_OnItsWay] = deque()
        self._next = layers[0]
        self._fill()

    def take(self, layer: int) -> int:
        """The buffer that has it: until `give` it stays there. Raises what `read` raised of it."""
        if not self._on_way or self._on_way[0].layer != layer:  # a step has failed, or there was none yet
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
        """Whether `take` would neither wait nor raise."""
        if not self._on_way or self._on_way[0].layer != layer:
            return False
        done = self._on_way[0].done
        return done.done() and done.exception() is None

    def give(self, buffer: int) -> None:
        """It has computed: the buffer is for the layer after the next."""
        self._free.append(buffer)
        self._fill()

    def alone(self, layer: int) -> int:
        """The buffer that has it, once it has been read while nothing computes and nothing else is read."""
        self._settle()
        buffer, self._next = self._free[0], layer
        self._reader.submit(self._read, layer, buffer).result()
        return buffer

    def close(self) -> None:
        """What is being read comes to its end first."""
        self._reader.shutdown(cancel_futures=True)
        del self._read  # which may have this: what it reads into goes at once

    def _settle(self) -> None:
        """Nothing is on its way."""
        wait([each.done for each in self._on_way])
        self._free += [each.buffer for each in self._on_way]
        self._on_way.clear()

    def _fill(self) -> None:
        while self._free:
            buffer, layer = self._free.pop(0), self._next
            self._on_way.append(_OnItsWay(layer, buffer, self._reader.submit(self._read, layer, buffer)))
            self._next = self._after[layer]
