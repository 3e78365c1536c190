"""Tensors read from files straight into the memory that they are made of, and digested on the way, while caches have
them: each byte is read once. Memory that one has left is the next one's, since pages that a process never had take
longer to come than to be read (measured: 0.45 s for each GB, beside 0.05).
Tensors of a layer that lie together in a file are read together: a layer's quantization is some thirty small ones.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from ..kernels.cpu.pages import LEAST_BYTES
from .contents import Piece, Tensors, of_piece, of_tensor, pieces_of, read_piece, start_of
from .cores import usable_cores
from .reading_rooms import Pinned, Rooms, Staging

__all__ = ["DTYPES", "Reader"]

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32, "U32": torch.uint32,
}  # fmt: skip
EXTENT_BYTES = 64 << 20  # that are read together, at most
RUN_BYTES = 4 << 20  # that are read at once: the processor's caches have them when they are digested
_MANY = 16  # runs of a tensor, from which on several threads read it, beside other tensors
_SOME = 4  # likewise of a tensor of a part of a model, which are read one after the other
_LAYER = re.compile(r".*?\.\d+\.")


class Reader:
    """Safe from several threads.

    order    of names, in which they will be read, more or less
    digests  whether each tensor that is read whole is digested
    pieces   that are digested where they are read whole, be it with a part of their tensor alone
    whole    all of that order will be read whole, so that those of an extent are read with the first of them
    staging  makes memory of the host that a device reads by itself, through which tensors go there; None: they stay
    extents  names that are read together, as they lie in their files
    """

    def __init__(
        self,
        tensors: Tensors,
        order: Iterable[str] = (),
        *,
        digests: bool = False,
        pieces: Collection[Piece] = (),
        whole: bool = False,
        staging: Staging | None = None,
    ) -> None:
        self._tensors, self._digests, self._pieces = tensors, digests, frozenset(pieces)
        self._digested: dict[Piece, bytes] = {}
        self._found: dict[str, bytes] = {}
        self._starts: dict[Path, int] = {}
        self._rooms = Rooms() if staging is None else Pinned(staging)
        self.extents = list(_extents(tensors, [name for name in order if name in tensors])) if whole else []
        self._extents = {name: extent for extent in map(_Extent, self.extents) for name in extent.names}

    @property
    def contents(self) -> Mapping[str, bytes]:
        """The digest of each tensor that was read whole, as `contents.each_digest` has it."""
        return self._found

    @property
    def digested(self) -> Mapping[Piece, bytes]:
        """The digest of each of `pieces` that was read whole."""
        return self._digested

    def whole(self, name: str) -> torch.Tensor:
        """Raises CheckpointError, OSError."""
        info = self._tensors[name][1]
        extent = self._extents.get(name)
        found = None if extent is None else self._of_extent(extent, name)
        if found is None:
            found = self._read([name])
        return found.view(DTYPES[info.dtype]).view(info.shape)

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Those of its first dimension, and no other byte of it. Raises CheckpointError, OSError."""
        info = self._tensors[name][1]
        row_bytes = info.nbytes // max(1, info.shape[0])
        begin, end = info.begin + first * row_bytes, info.begin + last * row_bytes
        memory = self._rooms.take(end - begin)
        # Cut as the whole tensor is: pieces that are not at the ends are its own.
        cut = (
            replace(each, begin=max(each.begin, begin), end=min(each.end, end))
            for each in pieces_of(self._tensors, [name])
        )
        self._read_runs([[piece] for piece in cut if piece.begin < piece.end], memory, begin)
        return _tensor(memory, info.dtype, (last - first, *info.shape[1:]))

    def close(self) -> None:
        """Give back what is not in use."""
        self._rooms.close()

    def _of_extent(self, extent: _Extent, name: str) -> torch.Tensor | None:
        """uint8; None: it was given before."""
        with extent.lock:
            if name not in extent.left:
                return None
            if extent.read is None:
                extent.read = self._read(extent.names)
            info, first = self._tensors[name][1], self._tensors[extent.names[0]][1].begin
            part = extent.read[info.begin - first : info.end - first]
            extent.left.discard(name)
            if not extent.left:
                extent.read = None  # its memory goes with the last tensor over it
        # What is small may be kept as it is, and would keep all.
        small = info.nbytes < LEAST_BYTES or part.storage_offset() % DTYPES[info.dtype].itemsize
        return part.clone() if small else part

    def _read(self, names: Sequence[str]) -> torch.Tensor:
        """Of neighbours, uint8."""
        first = self._tensors[names[0]][1].begin
        memory = self._rooms.take(self._tensors[names[-1]][1].end - first)
        found = self._read_runs(list(_runs(self._tensors, names)), memory, first, together=len(names) > 1)
        if self._digests:
            pieces: dict[str, list[bytes]] = {name: [] for name in names}
            for piece, digest in found.items():
                pieces[piece.name].append(digest)
            self._found.update({name: of_tensor(digests) for name, digests in pieces.items()})
        return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)

    def _read_runs(
        self, runs: Sequence[Sequence[Piece]], memory: memoryview, first: int, *, together: bool = False
    ) -> dict[Piece, bytes]:
        """Of a file, into memory that begins with that byte of its data. In order, digests of what shall have one.

        together: of several tensors, beside which others are read
        """
        if not runs:
            return {}
        name, path = runs[0][0].name, runs[0][0].path
        start = self._begin(name)

        def read(run: Sequence[Piece]) -> list[tuple[Piece, bytes]]:
            begin, end = run[0].begin, run[-1].end
            with memoryview(memory)[begin - first : end - first] as into:
                read_piece(Piece(run[0].name, path, begin, end), start + begin, into, file)
                wanted = [piece for piece in run if self._digests or piece in self._pieces]
                return [(piece, _digest(into[piece.begin - begin : piece.end - begin])) for piece in wanted]

        threads = min(usable_cores(), len(runs))
        # Opened once: the system reads ahead of what comes in a row.
        with path.open("rb", buffering=0) as file:
            if together or len(runs) < (_SOME if self._pieces else _MANY) or threads == 1:
                found = dict(chain.from_iterable(map(read, runs)))
            else:
                with ThreadPoolExecutor(threads) as pool:
                    found = dict(chain.from_iterable(pool.map(read, runs)))
        self._digested.update({piece: digest for piece, digest in found.items() if piece in self._pieces})
        return found

    def _begin(self, name: str) -> int:
        """Where the data of its file begin."""
        path = self._tensors[name][0]
        if path not in self._starts:
            self._starts[path] = start_of(path)
        return self._starts[path]


class _Extent:
    """Neighbours in a file. left: those that nobody has been given; read: their bytes, while some are left."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.left = names, set(names)
        self.read: torch.Tensor | None = None
        self.lock = threading.Lock()


def _digest(part: memoryview) -> bytes:
    with part:
        return of_piece(part)


def _extents(tensors: Tensors, order: Sequence[str]) -> Iterator[list[str]]:
    """Two tensors or more of a layer, of EXTENT_BYTES at most, without a gap. What is larger is one of its own."""
    together: list[str] = []
    for name in sorted(order, key=lambda name: (tensors[name][0], tensors[name][1].begin, tensors[name][1].end)):
        path, info = tensors[name]
        if together and (
            (path, info.begin) != (tensors[together[0]][0], tensors[together[-1]][1].end)
            or _layer(name) != _layer(together[0])
            or info.end - tensors[together[0]][1].begin > EXTENT_BYTES
        ):
            yield together
            together = []
        if info.dtype in DTYPES:
            together.append(name)
    if together:
        yield together


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return name if found is None else found[0]


def _runs(tensors: Tensors, names: Sequence[str]) -> Iterator[list[Piece]]:
    """Pieces of neighbours, as many as are read at once."""
    run: list[Piece] = []
    for piece in pieces_of(tensors, names):
        if run and piece.end - run[0].begin > RUN_BYTES:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _tensor(memory: memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    if not len(memory):
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    return torch.frombuffer(memory, dtype=DTYPES[dtype]).view(tuple(shape))
