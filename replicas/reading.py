"""Tensors read from files straight into the memory that they are made of, and digested on the way, while caches have
them: each byte is read once. Memory that one has left is the next one's, since pages that a process never had take
longer to come than to be read (measured: 0.45 s for each GB, beside 0.05).
Tensors of a layer that lie together in a file are read together: a layer's quantization is some thirty small ones.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import torch

from ..kernels.cpu.pages import LEAST_BYTES
from .contents import Piece, Tensors, of_piece, of_tensor, pieces_of, read_piece, start_of
from .cores import usable_cores
from .reading_rooms import Pinned, Rooms, Staging
from .safetensors_file import TensorInfo

__all__ = ["DTYPES", "Reader"]

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32, "U32": torch.uint32,
}  # fmt: skip
EXTENT_BYTES = 64 << 20  # that are read together, at most
RUN_BYTES = 4 << 20  # that are read at once: the processor's caches have them when they are digested
_MANY = 16  # runs of a tensor, from which on several threads read it
_LAYER = re.compile(r".*?\.\d+\.")


class Reader:
    """Safe from several threads.

    order    of names, in which they will be read, more or less
    digests  whether each tensor that is read whole is digested
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
        whole: bool = False,
        staging: Staging | None = None,
    ) -> None:
        self._tensors, self._digests = tensors, digests
        self._found: dict[str, bytes] = {}
        self._starts: dict[Path, int] = {}
        self._rooms = Rooms() if staging is None else Pinned(staging)
        self.extents = list(_extents(tensors, [name for name in order if name in tensors])) if whole else []
        self._extents = {name: extent for extent in map(_Extent, self.extents) for name in extent.names}

    @property
    def contents(self) -> Mapping[str, bytes]:
        """The digest of each tensor that was read whole, as `contents.each_digest` has it."""
        return self._found

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
        start, first = self._begin(names[0]), self._tensors[names[0]][1].begin
        memory = self._rooms.take(self._tensors[names[-1]][1].end - first)
        runs = list(_runs(self._tensors, names))

        def read(run: Sequence[Piece]) -> list[bytes]:
            begin, end = run[0].begin, run[-1].end
            with memoryview(memory)[begin - first : end - first] as into:
                read_piece(Piece(run[0].name, run[0].path, begin, end), start + begin, into, file)
                return [_digest(into[piece.begin - begin : piece.end - begin]) for piece in run if self._digests]

        threads = min(usable_cores(), len(runs))
        # Opened once: the system reads ahead of what comes in a row.
        with self._tensors[names[0]][0].open("rb", buffering=0) as file:
            if len(names) > 1 or len(runs) < _MANY or threads == 1:
                found = [read(run) for run in runs]
            else:
                with ThreadPoolExecutor(threads) as pool:
                    found = list(pool.map(read, runs))
        if self._digests:
            pieces: dict[str, list[bytes]] = {name: [] for name in names}
            for piece, digest in zip(chain.from_iterable(runs), chain.from_iterable(found), strict=True):
                pieces[piece.name].append(digest)
            self._found.update({name: of_tensor(digests) for name, digests in pieces.items()})
        return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)

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
