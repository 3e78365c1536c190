"""SHA-256 of many pieces of memory, by csrc/sha256.c where the CPU has the instructions, else by Python's hashlib."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable

from .native_build import load_library

DIGEST_BYTES = 32


def each_digest(data: memoryview, leaf: int) -> bytes:
    """Return the concatenated digests of each `leaf` bytes and of the remaining bytes; it releases the GIL.

    data  contiguous writable bytes
    """
    native = _native()
    if native is None or not len(data):
        return b"".join(hashlib.sha256(data[at : at + leaf]).digest() for at in range(0, len(data), leaf))
    found = ctypes.create_string_buffer(-(-len(data) // leaf) * DIGEST_BYTES)
    native(ctypes.byref(ctypes.c_char.from_buffer(data)), len(data), leaf, found)
    return found.raw


@functools.cache
def _native() -> Callable[..., int] | None:
    lib, _ = load_library("sha256")
    if lib is None:
        return None
    found = lib.motley_sha256
    found.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    return None if found(None, 0, 1, None) else found  # a call without data tells whether the CPU has the instructions
