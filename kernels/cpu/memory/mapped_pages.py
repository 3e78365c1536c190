"""System calls on many pages of mapped memory at once, where a page fault for each would take longer.

It imports no torch, so that it can start before torch is imported. The calls release the GIL, which those of Python's
`mmap` module do not.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref
from typing import Any, TypeAlias

MappedMemory: TypeAlias = "mmap.mmap | ctypes.Array[ctypes.c_uint8]"

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # since Linux 5.14
_FAILED = ctypes.c_void_p(-1).value  # result of mmap if it fails
_MOVE_THERE = 3  # MREMAP_MAYMOVE | MREMAP_FIXED


def populate_pages(memory: MappedMemory, begin: int = 0, end: int | None = None) -> int:
    """Map pages of a file, reading those that are not in memory; return 0, or the error number.

    EFAULT means that the file cannot be read there. `begin` must be the start of a page.
    """
    first = ctypes.c_char.from_buffer(memory)
    return _madvise(ctypes.addressof(first) + begin, (len(memory) if end is None else end) - begin, _POPULATE_READ)


def claim_range(address: int, nbytes: int) -> int:
    """Claim pages that nobody has written to, as if each were written; return 0, or the error number.

    `address` must be the start of a page.
    """
    return _madvise(address, nbytes, _POPULATE_WRITE)


def resident_pages(memory: MappedMemory, begin: int = 0, end: int | None = None) -> bytes:
    """Return, for each page of a mapped file, 1 if it is in the page cache, else 0.

    `begin` must be the start of a page.
    """
    first, nbytes = ctypes.c_char.from_buffer(memory), (len(memory) if end is None else end) - begin
    found = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    _libc().mincore(ctypes.addressof(first) + begin, nbytes, found)
    return bytes(page & 1 for page in found)


@functools.cache
def can_populate() -> bool:
    """Return whether `populate_pages` works here and reports errors.

    Where it does not, an error of reading a mapped file becomes a signal.
    """
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        return populate_pages(memory) == 0


def map_file(descriptor: int, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
    """Map a part of a file, copied on write; it is unmapped with the last object that refers to it.

    Unlike `mmap.mmap` it keeps no file descriptor open, and so does not keep a deleted file. `populate_pages` reports
    pages beyond the end of the file. `offset` must be the start of a page. Raises OSError.
    """
    libc = _libc()
    found = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, offset)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * nbytes).from_address(found)
    weakref.finalize(memory, libc.munmap, found, nbytes).atexit = False
    return memory


def is_mappable(path: str | os.PathLike[str]) -> bool:
    """Return whether `populate_pages` reads a file's first page.

    Not every system and not every network file system supports that.
    """
    if not can_populate():
        return False
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_COPY) as memory:
            return populate_pages(memory) == 0
    except (OSError, ValueError):
        return False


def detach_file(memory: MappedMemory) -> None:
    """Replace a file's mapped pages by a copy at the same addresses, so that later changes of the file do not matter.

    Writing to each page would not suffice: if the file is truncated its pages vanish, even those that were written to.
    Raises OSError.
    """
    if error := populate_pages(memory):  # without this, a page that cannot be read would raise a signal
        raise OSError(error, os.strerror(error))
    first = ctypes.c_char.from_buffer(memory)
    address, nbytes = ctypes.addressof(first), len(memory)
    libc = _libc()
    copy = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if copy == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    ctypes.memmove(copy, address, nbytes)
    if libc.mremap(copy, nbytes, nbytes, _MOVE_THERE, ctypes.c_void_p(address)) != address:
        error = ctypes.get_errno()
        libc.munmap(copy, nbytes)
        raise OSError(error, os.strerror(error))


def _madvise(address: int, nbytes: int, advice: int) -> int:
    return ctypes.get_errno() if _libc().madvise(address, nbytes, advice) else 0


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    at, size = ctypes.c_void_p, ctypes.c_size_t
    libc.madvise.argtypes = (at, size, ctypes.c_int)
    libc.mmap.argtypes, libc.mmap.restype = (at, size, *[ctypes.c_int] * 3, ctypes.c_int64), at
    libc.munmap.argtypes = (at, size)
    libc.mincore.argtypes = (at, size, at)
    if hasattr(libc, "mremap"):
        libc.mremap.argtypes, libc.mremap.restype = (at, size, size, ctypes.c_int, at), at
    return libc
