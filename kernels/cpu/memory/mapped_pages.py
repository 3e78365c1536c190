"""What the system does with pages of mapped memory, all at once, where a fault for each would take longer.

Without torch, so that it can begin before that is there. Calls let other threads run, which those of `mmap` do not.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref
from typing import Any, TypeAlias

__all__ = [
    "MappedMemory",
    "can_populate",
    "claim_range",
    "detach_file",
    "is_mappable",
    "map_file",
    "populate_pages",
    "resident_pages",
]

MappedMemory: TypeAlias = "mmap.mmap | ctypes.Array[ctypes.c_uint8]"

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # since Linux 5.14
_FAILED = ctypes.c_void_p(-1).value  # what mmap says
_MOVE_THERE = 3  # MREMAP_MAYMOVE | MREMAP_FIXED


def populate_pages(memory: MappedMemory, begin: int = 0, end: int | None = None) -> int:
    """Map pages of a file, read where they are not in memory: 0, or the error (EFAULT: the file cannot be read there).

    begin  of a page
    """
    first = ctypes.c_char.from_buffer(memory)
    return _madvise(ctypes.addressof(first) + begin, (len(memory) if end is None else end) - begin, _POPULATE_READ)


def claim_range(address: int, nbytes: int) -> int:
    """Take pages that nobody has written to, as if each were written: 0, or the error. address: of a page"""
    return _madvise(address, nbytes, _POPULATE_WRITE)


def resident_pages(memory: MappedMemory, begin: int = 0, end: int | None = None) -> bytes:
    """Of each page of a mapped file whether it is in the page cache: 1, or 0. begin: of a page"""
    first, nbytes = ctypes.c_char.from_buffer(memory), (len(memory) if end is None else end) - begin
    found = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    _libc().mincore(ctypes.addressof(first) + begin, nbytes, found)
    return bytes(page & 1 for page in found)


@functools.cache
def can_populate() -> bool:
    """Whether `populate_pages` does anything and tells what it finds; else an error of a mapped file is a signal."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        return populate_pages(memory) == 0


def map_file(descriptor: int, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
    """Those bytes of a file, copied where they are written to; they go with the last that refers to them.

    Unlike `mmap.mmap` it keeps no descriptor, and so no file that was deleted. What lies beyond the file's end
    `populate_pages` says. offset: of a page. Raises OSError.
    """
    libc = _libc()
    found = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, offset)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * nbytes).from_address(found)
    weakref.finalize(memory, libc.munmap, found, nbytes).atexit = False
    return memory


def is_mappable(path: str | os.PathLike[str]) -> bool:
    """Whether `populate_pages` brings a file's first page: not every system can, nor every network's file system."""
    if not can_populate():
        return False
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_COPY) as memory:
            return populate_pages(memory) == 0
    except (OSError, ValueError):
        return False


def detach_file(memory: MappedMemory) -> None:
    """A copy takes the place of the file's pages, at the same addresses: what becomes of the file is nothing to it.

    Not by writing to each page: those of a file that is cut go, whoever has written to them. Raises OSError.
    """
    if error := populate_pages(memory):  # else what cannot be read would be a signal
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
