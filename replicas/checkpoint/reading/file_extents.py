"""Extents of weight files: neighbouring tensors that are read together, and the memory map that they are used from.

If the system has dropped a page of the map, and cannot read it again when it is used, since the file was cut or the
disk fails at that moment, the process ends by a signal. Before that, while pages are first read, both are errors that
name the file, and so is a file whose size or time has changed by the end.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch

from ....kernels.cpu.memory.mapped_pages import MappedMemory, detach_file, map_file, populate_pages, resident_pages
from ...errors import CheckpointError
from .read_ahead import ReadAhead
from .weight_digests import DigestPiece, Tensors, read_piece, tensor_data_start, tensor_pieces

EXTENT_BYTES = 64 << 20  # most bytes that are read together
RUN_BYTES = 4 << 20  # bytes that are read at once, so that they are in the CPU's caches when they are digested
_LAYER = re.compile(r".*?\.\d+\.")

PieceRun = tuple[DigestPiece, ...]  # neighbouring pieces


class FileExtent:
    """Neighbouring tensors of one file that are read with the first of them that is wanted.

    left    names of the tensors that have not been taken yet
    read    their bytes, while some are left
    map     map of the file that belongs to this extent until its bytes were read, and then to the last tensor over it
    """

    def __init__(self, tensors: Tensors, names: Sequence[str]) -> None:
        self.names, self.left = names, set(names)
        self.runs = list(group_runs(tensors, names))
        self.path, first = tensors[names[0]]
        self.begin, self.end = first.begin, tensors[names[-1]][1].end
        self.read: torch.Tensor | None = None
        self.map: MappedMemory | None = None
        self.lock, self.mapping = threading.Lock(), threading.Lock()


class MappedFiles:
    """Maps of extents, whose pages are read run by run, ahead of their use. Safe from several threads."""

    def __init__(self, extents: Iterable[FileExtent]) -> None:
        """Create the maps of some extents, given more or less in the order in which they will be wanted."""
        self._of = {run: extent for extent in extents for run in extent.runs}
        self._files: dict[Path, tuple[FileIO, int, tuple[int, int]]] = {}
        self._maps: list[weakref.ref[MappedMemory]] = []
        self._lock = threading.Lock()
        sizes = {run: run[-1].end - run[0].begin for run in self._of}
        self._ahead = ReadAhead(sizes, self._bring, at_hand=self._at_hand)

    @contextmanager
    def brought(self, run: PieceRun) -> Iterator[None]:
        """Keep the pages of a run in memory, in the map of its extent, while they are used. Raises CheckpointError,
        OSError.
        """
        self._ahead.wait(run)
        yield
        self._ahead.used(run)

    def view(self, extent: FileExtent) -> memoryview:
        """Return an extent's bytes, whose pages `brought` reads. Raises CheckpointError, OSError."""
        memory, at = self._mapped(extent)
        return memoryview(memory).cast("B")[at : at + extent.end - extent.begin]

    def _mapped(self, extent: FileExtent) -> tuple[MappedMemory, int]:
        """Return the extent's map, which begins at a page boundary, and the offset in it at which the extent begins."""
        file, start = self.file(extent.path)
        at = (start + extent.begin) % mmap.PAGESIZE
        with extent.mapping:
            if extent.map is None:
                extent.map = map_file(file.fileno(), start + extent.begin - at, at + extent.end - extent.begin)
                with self._lock:
                    self._maps.append(weakref.ref(extent.map))
            return extent.map, at

    def _pages(self, run: PieceRun) -> tuple[MappedMemory, int, int]:
        """Return the map that holds a run, and the range of its pages as (begin, end)."""
        extent = self._of[run]
        memory, at = self._mapped(extent)
        begin, end = (at + each - extent.begin for each in (run[0].begin, run[-1].end))
        return memory, begin // mmap.PAGESIZE * mmap.PAGESIZE, end

    def _at_hand(self, run: PieceRun) -> bool:
        return all(resident_pages(*self._pages(run)))

    def _bring(self, run: PieceRun) -> None:
        if error := populate_pages(*self._pages(run)):
            begin, end = run[0].begin, run[-1].end
            start = self.file(run[0].path)[1]
            # Reading it again raises the error that says why.
            read_piece(
                DigestPiece(run[0].name, run[0].path, begin, end), start + begin, memoryview(bytearray(end - begin))
            )
            raise OSError(error, os.strerror(error))

    def close(self) -> None:
        """Detach the tensors in use from the files, so that later changes of the files do not matter. Raises
        CheckpointError if a file has changed since it was opened, OSError.
        """
        self._ahead.close()
        try:
            self._check()
            for each in self._maps:
                if (memory := each()) is not None:
                    detach_file(memory)
            self._check()  # once more, since detaching has copied bytes from the files
        finally:
            self.drop()

    def drop(self) -> None:
        """Stop reading and close the files, even if extents are in use."""
        self._ahead.close()
        for file, _, _ in self._files.values():
            file.close()
        self._files.clear()
        self._maps.clear()

    def _check(self) -> None:
        for path, (file, _, signature) in self._files.items():
            if _signature(file) != signature:
                raise CheckpointError("has changed while it was read", file=path.name)

    def file(self, path: Path) -> tuple[FileIO, int]:
        """Return an open file, the same one even if another file has its name by now, and the offset where its data
        begin. Raises OSError, CheckpointError.
        """
        with self._lock:
            if path not in self._files:
                file = path.open("rb", buffering=0)
                self._files[path] = file, tensor_data_start(path), _signature(file)
            return self._files[path][:2]


def group_extents(tensors: Tensors, names: Sequence[str]) -> list[FileExtent]:
    """Group the named tensors into extents, in the order of the files: each is of one layer, has no gap and at most
    EXTENT_BYTES. A larger tensor is an extent of its own.
    """
    found: list[list[str]] = []
    together: list[str] = []
    for name in sorted(names, key=lambda name: (tensors[name][0], tensors[name][1].begin, tensors[name][1].end)):
        path, info = tensors[name]
        if not together or (
            (path, info.begin) != (tensors[together[0]][0], tensors[together[-1]][1].end)
            or _layer_prefix(name) != _layer_prefix(together[0])
            or info.end - tensors[together[0]][1].begin > EXTENT_BYTES
        ):
            found.append(together := [])
        together.append(name)
    return [FileExtent(tensors, each) for each in found]


def _layer_prefix(name: str) -> str:
    found = _LAYER.match(name)
    return name if found is None else found[0]


def group_runs(tensors: Tensors, names: Sequence[str]) -> Iterator[PieceRun]:
    """Group the tensors' pieces into runs of neighbours that are read at once, of at most RUN_BYTES."""
    run: list[DigestPiece] = []
    for piece in tensor_pieces(tensors, names):
        if run and piece.end - run[0].begin > RUN_BYTES:
            yield tuple(run)
            run = []
        run.append(piece)
    if run:
        yield tuple(run)


def _signature(file: FileIO) -> tuple[int, int]:
    """Return the file's size and modification time, which change when it is written to, but not with its name or
    owner.
    """
    it = os.fstat(file.fileno())
    return it.st_size, it.st_mtime_ns
