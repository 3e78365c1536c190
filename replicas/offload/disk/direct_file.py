"""Reads of weights past the page cache, which would otherwise fill memory with the model that is not to be in
memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref

import torch

from ...errors import EngineFault
from ..planning.disk_plan import PAGE_BYTES, round_to_pages

_ONCE = 1 << 30  # most bytes that one call reads: Linux gives no more than 2 GiB


class DirectFile:
    """File that is read past the page cache; it stays open until nothing refers to it.

    direct      whether the disk writes directly to the program's memory (O_DIRECT); otherwise pages are dropped after
                use
    bytes_read  bytes read so far
    seconds     seconds that all these reads took together

    Measured on a virtual disk at 1.4 to 2.0 GB/s, equally fast in both ways: direct reads took 4% of a core, reads
    through the page cache with dropping 30%.
    """

    def __init__(self, descriptor: int, *, direct: bool = True) -> None:
        """Open the file of `descriptor` again; that descriptor stays the caller's. Raises OSError.

        direct  whether to use O_DIRECT if the file system supports it
        """
        path = f"/proc/self/fd/{descriptor}"  # the same file, even if its name is another file's by now
        opened = _open_direct(path) if direct else None
        self.direct = opened is not None
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if opened is None else opened
        self.bytes_read, self.seconds = 0, 0.0
        self._counting = threading.Lock()  # rows and layers are read by two threads
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def read(self, memory: memoryview, begin: int, end: int) -> int:
        """Read bytes [begin, end) of the file and return where in `memory` they begin: at the offset that `begin` has
        within its page.

        memory  begins at a page and has at least `round_to_pages(end - begin)` bytes

        Raises EngineFault where the file cannot be read or is too short.
        """
        first = begin // PAGE_BYTES * PAGE_BYTES
        done, wanted = 0, -(-(end - first) // PAGE_BYTES) * PAGE_BYTES
        assert len(memory) >= wanted, "the buffer has room"
        began = time.perf_counter()
        try:
            while done < end - first:
                got = os.preadv(self._descriptor, [memory[done : min(wanted, done + _ONCE)]], first + done)
                if got == 0:
                    raise EngineFault(f"weights on disk end at byte {first + done}; {end} were expected")
                # The last page of a file may be short; any other short read is repeated from the start of its page.
                done += got if done + got >= end - first else got // PAGE_BYTES * PAGE_BYTES
                if got < PAGE_BYTES and done < end - first:
                    raise EngineFault(f"weights on disk end at byte {first + done + got}; {end} were expected")
        except OSError as error:
            raise EngineFault(f"weights on disk cannot be read: {error}") from error
        with self._counting:
            self.bytes_read, self.seconds = self.bytes_read + done, self.seconds + time.perf_counter() - began
        if not self.direct:
            os.posix_fadvise(self._descriptor, first, wanted, os.POSIX_FADV_DONTNEED)
        return begin - first

    def forget(self, begin: int, end: int) -> None:
        """Drop these bytes from the page cache, where other reads have left them."""
        os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._close()


class DiskTable:
    """Table [V, H] on disk, of which a step reads only the rows of its tokens."""

    def __init__(self, file: DirectFile, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Open the table [V, H] that begins at byte `begin` of the file."""
        self._file, self._begin, self._width, self._dtype = file, begin, shape[1], dtype
        self._row_bytes = self._width * dtype.itemsize
        self._memory = mmap.mmap(-1, round_to_pages(self._row_bytes))
        self._view = memoryview(self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that reading rows of the table takes."""
        return len(self._memory)

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        """Read the rows of token ids [T] from disk and return them as [T, H]. Raises EngineFault."""
        rows = ids.tolist()
        place_of = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        found = torch.empty(len(place_of), self._width, dtype=self._dtype)
        for row, place in place_of.items():
            begin = self._begin + row * self._row_bytes
            offset = self._file.read(self._view, begin, begin + self._row_bytes)
            found[place] = torch.frombuffer(self._memory, dtype=self._dtype, count=self._width, offset=offset)
        return found[[place_of[row] for row in rows]]


def _open_direct(path: str) -> int | None:
    """Open a file for reads with O_DIRECT and return the descriptor; None where the file system does not support
    that.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
            os.preadv(descriptor, [view], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
