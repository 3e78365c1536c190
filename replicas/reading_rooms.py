"""Memory that tensors are read into: what one has left is the next one's."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

import torch

from ..kernels.cpu.memory.lazy_pages import MIN_BYTES, allocate_bytes

__all__ = ["KEPT_BYTES", "PINNED_BYTES", "Pinned", "Rooms", "Staging"]

log = logging.getLogger(__name__)

Staging = Callable[[int], torch.Tensor]  # uint8 of so many bytes of the host, which a device reads by itself

KEPT_BYTES = 256 << 20  # of memory that was left, at most
PINNED_BYTES = 1 << 30  # at most: what is pinned nobody else of the host can have
_LEAST_PINNED = 64 << 20  # at a time, so that a few do for tensors of all sizes


class Rooms:
    """Memory that comes back when the last tensor over it has gone. Safe from several threads."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._closed = False
        self._lock = threading.RLock()  # what comes back may do so while a thread of ours is in here

    def take(self, nbytes: int) -> memoryview:
        if nbytes < MIN_BYTES:
            return allocate_bytes(nbytes)
        with self._lock:
            fits = [each for each in self._free if nbytes <= len(each) <= self._most(nbytes)]
            memory = min(fits, key=len) if fits else self._make(nbytes)
            self._free = [each for each in self._free if each is not memory]
        view = memory[:nbytes]
        weakref.finalize(view, self._back, memory).atexit = False
        return view

    def close(self) -> None:
        """Give back what is not in use."""
        with self._lock:
            self._closed = True
            self._free = []

    def _most(self, nbytes: int) -> int:
        """That may be taken for so many."""
        return nbytes + nbytes // 8

    def _make(self, nbytes: int) -> memoryview:
        return allocate_bytes(nbytes)

    def _keeps(self, memory: memoryview) -> bool:
        return sum(map(len, self._free)) + len(memory) <= KEPT_BYTES

    def _back(self, memory: memoryview) -> None:
        with self._lock:
            if not self._closed and self._keeps(memory):
                self._free = [*self._free, memory]


class Pinned(Rooms):
    """Which a device copies from by itself: of other memory its driver would make a copy first.

    As much as PINNED_BYTES, all of which is kept until the end, since to pin takes longer than to read; beyond, and
    where the host pins no more, memory as any other.
    """

    def __init__(self, staging: Staging) -> None:
        super().__init__()
        self._staging = staging
        self._pinned: set[int] = set()  # ids of what is there for as long as this is
        self._nbytes = 0

    def _most(self, nbytes: int) -> int:
        return PINNED_BYTES

    def _make(self, nbytes: int) -> memoryview:
        size = max(_LEAST_PINNED, 1 << (nbytes - 1).bit_length())  # as torch rounds what it pins
        if self._nbytes + size > PINNED_BYTES:
            return allocate_bytes(nbytes)
        try:
            memory: memoryview = self._staging(size).numpy().data
        except RuntimeError as error:
            log.warning("weights are read into memory that is not pinned: %s", error)
            self._nbytes = PINNED_BYTES  # and no more is asked for
            return allocate_bytes(nbytes)
        self._nbytes += size
        self._pinned.add(id(memory))
        return memory

    def _keeps(self, memory: memoryview) -> bool:
        return id(memory) in self._pinned
