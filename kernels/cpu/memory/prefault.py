"""Memory for weights whose pages are taken while Python still imports torch, on a core that is idle until then.

Pages that a process never had are most of what a first start waits for: of a virtual machine whose host has taken back
what was free, a gigabyte takes a second and more. Without torch, so that it can begin before that is there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from contextlib import suppress

from ..c_kernels.native_build import load_library

__all__ = ["MIN_BYTES", "PrefaultedRegion", "start_prefault", "stop_prefault", "take_prefaulted"]

MIN_BYTES = 1 << 20  # of which pages are worth it


class PrefaultedRegion:
    """One region, whose pages a thread takes from its start on, and whose parts are given out in that order."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError where there is no such room."""
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._given = 0
        self._left: list[tuple[int, int]] = []  # parts that were given back, while the thread may still take pages
        self._stop = ctypes.c_int32(0)
        self._ended = threading.Event()
        self._closed = False  # and nothing takes pages any more
        self._lock = threading.RLock()  # what is given back may be so while a thread of ours is in here
        self._thread = threading.Thread(target=self._run, name="takes memory", daemon=True)
        self._thread.start()

    def take(self, nbytes: int) -> memoryview | None:
        """So many bytes from the start of a page on, which go with the last that refers to them; None: no room."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if self._ended.is_set() or self._given + size > len(self._memory):
                return None
            begin, self._given = self._given, self._given + size
        # Whatever is a view of it, or of a view, refers to the array, as it would not to a view that it was made of.
        part = (ctypes.c_uint8 * nbytes).from_buffer(self._memory, begin)
        weakref.finalize(part, self._back, begin, size).atexit = False
        return memoryview(part).cast("B")

    def close(self) -> None:
        """Take no more, and give back what nobody has: soon, since a thread that is idle otherwise must stop first."""
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
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread alone
        touch = lib.motley_touch
        touch.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        touch(address, len(self._memory), mmap.PAGESIZE, ctypes.byref(self._stop))


_region: PrefaultedRegion | None = None


def start_prefault(nbytes: int) -> None:
    """Take memory for a model that is about to be loaded: about so many bytes."""
    global _region
    if nbytes >= MIN_BYTES and hasattr(mmap, "MAP_ANONYMOUS"):
        stop_prefault()
        with suppress(OSError):
            _region = PrefaultedRegion(nbytes)


def take_prefaulted(nbytes: int) -> memoryview | None:
    """Of what was taken, if there is any left."""
    ahead = _region
    return None if ahead is None else ahead.take(nbytes)


def stop_prefault() -> None:
    """The model is loaded: what is left of it goes back."""
    global _region
    ahead, _region = _region, None
    if ahead is not None:
        ahead.close()
