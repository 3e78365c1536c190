"""Tensors read from files straight into the memory that they are made of, and digested on the way, while caches have
them: each byte is read once. While some are used, the disk brings the next; memory that one has left is the next one's,
since pages that a process never had take longer to come than to be read (measured: 0.45 s for each GB, beside 0.05).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch

from ..kernels.cpu.pages import LEAST_BYTES, room
from .contents import Tensors, of_piece, of_tensor, pieces_of, read_piece, start_of
from .cores import usable_cores
from .safetensors_file import TensorInfo

__all__ = ["DTYPES", "Reader"]

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32, "U32": torch.uint32,
}  # fmt: skip
AHEAD_BYTES = 128 << 20  # that the disk is asked for beyond what is read
KEPT_BYTES = 256 << 20  # of memory that was left, at most
_MANY = 16  # pieces of a tensor, from which on several threads read it


class Reader:
    """Safe from several threads.

    order    of names, in which they will be read, more or less
    digests  whether each tensor that is read whole is digested
    """

    def __init__(self, tensors: Tensors, order: Iterable[str] = (), *, digests: bool = False) -> None:
        self._tensors, self._digests = tensors, digests
        self._found: dict[str, bytes] = {}
        self._starts: dict[Path, int] = {}
        self._rooms = _Rooms()
        self._ahead = _Ahead(tensors, [name for name in order if name in tensors])

    @property
    def contents(self) -> Mapping[str, bytes]:
        """The digest of each tensor that was read whole, as `contents.each_digest` has it."""
        return self._found

    def whole(self, name: str) -> torch.Tensor:
        """Raises CheckpointError, OSError."""
        info, start = self._tensors[name][1], self._begin(name)
        memory = self._rooms.take(info.nbytes)
        pieces = list(pieces_of(self._tensors, [name]))

        def read(number: int) -> bytes:
            piece = pieces[number]
            with memoryview(memory)[piece.begin - info.begin : piece.end - info.begin] as part:
                read_piece(piece, start + piece.begin, part)
                return of_piece(part) if self._digests else b""

        threads = min(usable_cores(), len(pieces))
        if len(pieces) < _MANY or threads == 1:
            found = [read(number) for number in range(len(pieces))]
        else:
            with ThreadPoolExecutor(threads) as pool:
                found = list(pool.map(read, range(len(pieces))))
        if self._digests:
            self._found[name] = of_tensor(found)
        return _tensor(memory, info.dtype, info.shape)

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Those of its first dimension, and no other byte of it. Raises CheckpointError, OSError."""
        path, info = self._tensors[name]
        start = self._begin(name)
        row_bytes = info.nbytes // max(1, info.shape[0])
        begin = info.begin + first * row_bytes
        part = TensorInfo(info.dtype, (last - first, *info.shape[1:]), begin, begin + (last - first) * row_bytes)
        memory = self._rooms.take(part.nbytes)
        for piece in pieces_of({name: (path, part)}, [name]):
            with memoryview(memory)[piece.begin - begin : piece.end - begin] as into:
                read_piece(piece, start + piece.begin, into)
        return _tensor(memory, part.dtype, part.shape)

    def close(self) -> None:
        """Give back what is not in use."""
        self._rooms.close()

    def _begin(self, name: str) -> int:
        """Where the data of its file begin; what comes after it is on its way by then."""
        path = self._tensors[name][0]
        if path not in self._starts:
            self._starts[path] = start_of(path)
        self._ahead.read(name, self._starts)
        return self._starts[path]


class _Rooms:
    """Memory that comes back when the last tensor over it has gone."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._closed = False
        self._lock = threading.RLock()  # what comes back may do so while a thread of ours is in here

    def take(self, nbytes: int) -> memoryview:
        if nbytes < LEAST_BYTES:
            return room(nbytes)
        with self._lock:
            fits = [each for each in self._free if nbytes <= len(each) <= nbytes + nbytes // 8]
            memory = min(fits, key=len) if fits else room(nbytes)
            self._free = [each for each in self._free if each is not memory]
        view = memory[:nbytes]
        weakref.finalize(view, self._back, memory).atexit = False
        return view

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._free = []

    def _back(self, memory: memoryview) -> None:
        with self._lock:
            if not self._closed and sum(map(len, self._free)) + len(memory) <= KEPT_BYTES:
                self._free = [*self._free, memory]


class _Ahead:
    """Asks the disk for what is read next, in that order."""

    def __init__(self, tensors: Tensors, order: Sequence[str]) -> None:
        self._tensors, self._order = tensors, order
        ends = list(accumulate(tensors[name][1].nbytes for name in order))
        self._end_of = dict(zip(order, ends, strict=True))
        self._asked = 0  # so many of them
        self._lock = threading.Lock()

    def read(self, name: str, starts: Mapping[Path, int]) -> None:
        """It is read now. starts: of files that were opened; others are not looked into."""
        end = self._end_of.get(name)
        if end is None:
            return
        with self._lock:
            before = self._end_of[self._order[self._asked - 1]] if self._asked else 0
            if end > before + AHEAD_BYTES and self._asked:
                return  # out of its turn
            first = self._asked
            while self._asked < len(self._order) and self._end_of[self._order[self._asked]] <= end + AHEAD_BYTES:
                self._asked += 1
            wanted = self._order[first : self._asked]
        for each in wanted:
            path, info = self._tensors[each]
            if path in starts:
                _ask(path, starts[path] + info.begin, info.nbytes)


def _ask(path: Path, begin: int, nbytes: int) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError), path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), begin, nbytes, os.POSIX_FADV_WILLNEED)


def _tensor(memory: memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    if not len(memory):
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    return torch.frombuffer(memory, dtype=DTYPES[dtype]).view(tuple(shape))
