"""Memory for weights whose pages are prefaulted while Python still imports torch, on a core that is idle until then.

Page faults are most of what a first start waits for: on a virtual machine whose host has reclaimed free memory, a
gigabyte takes a second or more. This module imports no torch, so that it can start before torch is imported.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from contextlib import suppress

from ..c_kernels.native_build import load_library

MIN_BYTES = 1 << 20  # smallest size for which prefaulting is worth it


class PrefaultedRegion:
    """Memory region that a thread prefaults from its start on, and whose parts are handed out in that order."""

    def __init__(self, nbytes: int) -> None:
        """Reserve the region and start the thread. Raises OSError if there is not so much memory."""
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._given = 0
        self._left: list[tuple[int, int]] = []  # parts that were returned while the thread may still claim pages
        self._stop = ctypes.c_int32(0)
        self._ended = threading.Event()
        self._closed = False  # set once the thread claims no more pages
        self._lock = threading.RLock()  # reentrant, since a part may be returned while this thread holds the lock
        self._thread = threading.Thread(target=self._run, name="takes memory", daemon=True)
        self._thread.start()

    def take(self, nbytes: int) -> memoryview | None:
        """Return memory that begins at the start of a page, or None if there is not enough.

        It is returned to the region with the last object that refers to it.
        """
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if self._ended.is_set() or self._given + size > len(self._memory):
                return None
            begin, self._given = self._given, self._given + size
        # A view, and a view of a view, refers to this array; it would not refer to a memoryview that it was made from.
        part = (ctypes.c_uint8 * nbytes).from_buffer(self._memory, begin)
        weakref.finalize(part, self._back, begin, size).atexit = False
        return memoryview(part).cast("B")

    def close(self) -> None:
        """Claim no more pages, and soon release those that nobody uses.

        It is not immediate, since the thread, which runs only on an idle core, must stop first.
        """
        self._stop.value = 1
        self._ended.set()

    def _back(self, begin: int, size: int) -> None:
        with self._lock:
            if self._closed:
                self._drop(begin, size)
            else:
                self._left.append((begin, size))

    def _drop(self, begin: int, size: int) -> None:
        if size:
            self._memory.madvise(mmap.MADV_DONTNEED, begin, size)

    def _run(self) -> None:
        self._touch()
        self._ended.wait()
        with self._lock:
            self._closed = True
            for begin, size in [*self._left, (self._given, len(self._memory) - self._given)]:
                self._drop(begin, size)

    def _touch(self) -> None:
        lib, _ = load_library("touch")
        if lib is None:
            return
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # applies to this thread only
        touch = lib.motley_touch
        touch.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        touch(address, len(self._memory), mmap.PAGESIZE, ctypes.byref(self._stop))


_region: PrefaultedRegion | None = None


def start_prefault(nbytes: int) -> None:
    """Prefault about `nbytes` of memory for a model that is about to be loaded."""
    global _region
    if nbytes >= MIN_BYTES and hasattr(mmap, "MAP_ANONYMOUS"):
        stop_prefault()
        with suppress(OSError):
            _region = PrefaultedRegion(nbytes)


def take_prefaulted(nbytes: int) -> memoryview | None:
    """Return prefaulted memory, or None if not enough is left."""
    ahead = _region
    return None if ahead is None else ahead.take(nbytes)


def stop_prefault() -> None:
    """Release the rest of the prefaulted memory once the model is loaded."""
    global _region
    ahead, _region = _region, None
    if ahead is not None:
        ahead.close()
