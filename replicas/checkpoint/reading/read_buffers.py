"""Buffers that tensors are read into; memory that one tensor has left is used for the next."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

import torch

from ....kernels.cpu.memory.lazy_pages import MIN_BYTES, allocate_bytes

log = logging.getLogger(__name__)

AllocateStaging = Callable[[int], torch.Tensor]  # makes uint8 host memory of that size, which a device reads by itself

MAX_FREE_BYTES = 256 << 20  # most bytes of free memory that is kept
PINNED_BYTES = 1 << 30  # most bytes that are pinned, since no other process can use them
_MIN_PINNED_BYTES = 64 << 20  # least bytes pinned at a time, so that a few buffers serve tensors of all sizes


class ReadBuffers:
    """Pool of memory that returns when the last tensor over it is freed. Safe from several threads."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._closed = False
        self._lock = threading.RLock()  # memory may be given back by a finalizer while this thread holds the lock

    def take(self, nbytes: int) -> memoryview:
        if nbytes < MIN_BYTES:
            return allocate_bytes(nbytes)
        with self._lock:
            fits = [each for each in self._free if nbytes <= len(each) <= self._max_buffer_bytes(nbytes)]
            memory = min(fits, key=len) if fits else self._make(nbytes)
            self._free = [each for each in self._free if each is not memory]
        view = memory[:nbytes]
        weakref.finalize(view, self._back, memory).atexit = False
        return view

    def close(self) -> None:
        """Free the pool's memory that no tensor uses, and keep none that is given back later."""
        with self._lock:
            self._closed = True
            self._free = []

    def _max_buffer_bytes(self, nbytes: int) -> int:
        """Return the largest buffer that may be taken for `nbytes` bytes."""
        return nbytes + nbytes // 8

    def _make(self, nbytes: int) -> memoryview:
        return allocate_bytes(nbytes)

    def _fits_pool(self, memory: memoryview) -> bool:
        return sum(map(len, self._free)) + len(memory) <= MAX_FREE_BYTES

    def _back(self, memory: memoryview) -> None:
        with self._lock:
            if not self._closed and self._fits_pool(memory):
                self._free = [*self._free, memory]


class PinnedReadBuffers(ReadBuffers):
    """Pool of pinned host memory, which a device copies from by itself; from other memory its driver would make a copy
    first.

    It pins up to PINNED_BYTES and keeps all of that until the end, since pinning takes longer than reading. Beyond
    that, or where the host pins no more, it uses ordinary memory.
    """

    def __init__(self, staging: AllocateStaging) -> None:
        super().__init__()
        self._staging = staging
        self._pinned: set[int] = set()  # ids of buffers that live as long as this pool
        self._nbytes = 0

    def _max_buffer_bytes(self, nbytes: int) -> int:
        return PINNED_BYTES

    def _make(self, nbytes: int) -> memoryview:
        size = max(_MIN_PINNED_BYTES, 1 << (nbytes - 1).bit_length())  # torch rounds pinned sizes up to powers of two
        if self._nbytes + size > PINNED_BYTES:
            return allocate_bytes(nbytes)
        try:
            memory: memoryview = self._staging(size).numpy().data
        except RuntimeError as error:
            log.warning("Weights are read into memory that this host does not pin, which is slower: %s", error)
            self._nbytes = PINNED_BYTES  # no further memory is pinned
            return allocate_bytes(nbytes)
        self._nbytes += size
        self._pinned.add(id(memory))
        return memory

    def _fits_pool(self, memory: memoryview) -> bool:
        return id(memory) in self._pinned
