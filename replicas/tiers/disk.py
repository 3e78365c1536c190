"""Reading of weights past the page cache, which would otherwise come to hold the model that memory shall not."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref

import torch

from ..errors import EngineFault
from .plan import PAGE, in_pages

__all__ = ["DirectFile", "Rows"]

_ONCE = 1 << 30  # bytes that one call is asked for: Linux gives no more than 2 GiB


class DirectFile:
    """An open file, until nothing refers to it. direct: whether the disk writes to our memory itself (O_DIRECT).

    bytes_read  of it, until now; seconds: that each of these reads took

    Measured on a virtual disk at 1.4 to 2.0 GB/s, both ways alike: directly took 4% of a core, through the page cache
    and out of it again 30%.
    """

    def __init__(self, descriptor: int, *, direct: bool = True) -> None:
        """descriptor: stays the caller's. direct: as far as the file system has it. Raises OSError."""
        path = f"/proc/self/fd/{descriptor}"  # this very file, whatever has its name by now
        opened = _direct(path) if direct else None
        self.direct = opened is not None
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if opened is None else opened
        self.bytes_read, self.seconds = 0, 0.0
        self._counting = threading.Lock()  # rows and layers are read by two threads
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def read(self, memory: memoryview, begin: int, end: int) -> int:
        """Bytes [begin, end) into `memory`, from where that begins within its page; which is told.

        memory  begins with a page, of `in_pages(end - begin)` bytes at least

        Raises EngineFault where it cannot be read, or ends before.
        """
        first = begin // PAGE * PAGE
        done, wanted = 0, -(-(end - first) // PAGE) * PAGE
        assert len(memory) >= wanted, "the buffer has room"
        began = time.perf_counter()
        try:
            while done < end - first:
                got = os.preadv(self._descriptor, [memory[done : min(wanted, done + _ONCE)]], first + done)
                if got == 0:
                    raise EngineFault(f"weights on disk end at byte {first + done}; {end} were expected")
                # Of a file's last page less may come; whatever else is short is asked for again, from a page on.
                done += got if done + got >= end - first else got // PAGE * PAGE
                if got < PAGE and done < end - first:
                    raise EngineFault(f"weights on disk end at byte {first + done + got}; {end} were expected")
        except OSError as error:
            raise EngineFault(f"weights on disk cannot be read: {error}") from error
        with self._counting:
            self.bytes_read, self.seconds = self.bytes_read + done, self.seconds + time.perf_counter() - began
        if not self.direct:
            os.posix_fadvise(self._descriptor, first, wanted, os.POSIX_FADV_DONTNEED)
        return begin - first

    def forget(self, begin: int, end: int) -> None:
        """Whatever the page cache has of these bytes, since others have read them."""
        os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._close()


class Rows:
    """A table [V, H] on disk, of which a step reads the rows that its tokens want."""

    def __init__(self, file: DirectFile, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """begin: of the table in the file."""
        self._file, self._begin, self._width, self._dtype = file, begin, shape[1], dtype
        self._row_bytes = self._width * dtype.itemsize
        self._memory = mmap.mmap(-1, in_pages(self._row_bytes))
        self._view = memoryview(self._memory)

    @property
    def nbytes(self) -> int:
        """In memory."""
        return len(self._memory)

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]. Raises EngineFault."""
        rows = ids.tolist()
        place_of = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        found = torch.empty(len(place_of), self._width, dtype=self._dtype)
        for row, place in place_of.items():
            begin = self._begin + row * self._row_bytes
            offset = self._file.read(self._view, begin, begin + self._row_bytes)
            found[place] = torch.frombuffer(self._memory, dtype=self._dtype, count=self._width, offset=offset)
        return found[[place_of[row] for row in rows]]


def _direct(path: str) -> int | None:
    """None: the file system has no such reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    try:
        with mmap.mmap(-1, PAGE) as page, memoryview(page) as view:
            os.preadv(descriptor, [view], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
