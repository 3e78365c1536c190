"""Neighbours in a file that are read together, and the map of it that they are used from.

A page that the system has given back meanwhile, and cannot read again where it is used, ends the process by a signal:
of a file that was cut, or a disk that fails, just then. Before that both are errors by name, and so is a file whose
size or time has changed by the end.
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

from ..kernels.cpu.memory.mapped_pages import MappedMemory, detach_file, map_file, populate_pages, resident_pages
from .contents import Piece, Tensors, pieces_of, read_piece, start_of
from .errors import CheckpointError
from .read_ahead import ReadAhead

__all__ = ["EXTENT_BYTES", "RUN_BYTES", "Extent", "MappedFiles", "Run", "extents_of", "runs_of"]

EXTENT_BYTES = 64 << 20  # that are read together, at most
RUN_BYTES = 4 << 20  # that are read at once: the processor's caches have them when they are digested
_LAYER = re.compile(r".*?\.\d+\.")

Run = tuple[Piece, ...]  # neighbours


class Extent:
    """Tensors that are read with the first of them that is wanted.

    left    those that nobody has been given
    read    their bytes, while some are left
    map     of the file, which is this extent's until its bytes were read, and then goes with the last tensor over it
    """

    def __init__(self, tensors: Tensors, names: Sequence[str]) -> None:
        self.names, self.left = names, set(names)
        self.runs = list(runs_of(tensors, names))
        self.path, first = tensors[names[0]]
        self.begin, self.end = first.begin, tensors[names[-1]][1].end
        self.read: torch.Tensor | None = None
        self.map: MappedMemory | None = None
        self.lock, self.mapping = threading.Lock(), threading.Lock()


class MappedFiles:
    """Maps of extents, whose pages come run by run, ahead of who wants them. Safe from several threads."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        """extents: in the order in which they will be wanted, more or less."""
        self._of = {run: extent for extent in extents for run in extent.runs}
        self._files: dict[Path, tuple[FileIO, int, tuple[int, int]]] = {}
        self._maps: list[weakref.ref[MappedMemory]] = []
        self._lock = threading.Lock()
        sizes = {run: run[-1].end - run[0].begin for run in self._of}
        self._ahead = ReadAhead(sizes, self._bring, at_hand=self._at_hand)

    @contextmanager
    def brought(self, run: Run) -> Iterator[None]:
        """While its pages are in use: they are in memory, in the map of its extent. Raises CheckpointError, OSError."""
        self._ahead.wait(run)
        yield
        self._ahead.used(run)

    def view(self, extent: Extent) -> memoryview:
        """Its bytes, whose pages come with `brought`. Raises CheckpointError, OSError."""
        memory, at = self._mapped(extent)
        return memoryview(memory).cast("B")[at : at + extent.end - extent.begin]

    def _mapped(self, extent: Extent) -> tuple[MappedMemory, int]:
        """Its map, which begins with a page, and where it begins in there itself."""
        file, start = self.file(extent.path)
        at = (start + extent.begin) % mmap.PAGESIZE
        with extent.mapping:
            if extent.map is None:
                extent.map = map_file(file.fileno(), start + extent.begin - at, at + extent.end - extent.begin)
                with self._lock:
                    self._maps.append(weakref.ref(extent.map))
            return extent.map, at

    def _pages(self, run: Run) -> tuple[MappedMemory, int, int]:
        """A run's: the map that they are in, from where to where."""
        extent = self._of[run]
        memory, at = self._mapped(extent)
        begin, end = (at + each - extent.begin for each in (run[0].begin, run[-1].end))
        return memory, begin // mmap.PAGESIZE * mmap.PAGESIZE, end

    def _at_hand(self, run: Run) -> bool:
        return all(resident_pages(*self._pages(run)))

    def _bring(self, run: Run) -> None:
        if error := populate_pages(*self._pages(run)):
            begin, end = run[0].begin, run[-1].end
            start = self.file(run[0].path)[1]
            # To be told why.
            read_piece(Piece(run[0].name, run[0].path, begin, end), start + begin, memoryview(bytearray(end - begin)))
            raise OSError(error, os.strerror(error))

    def close(self) -> None:
        """What is in use stays as it is, whatever becomes of the files. Raises CheckpointError where one has changed
        since it was opened, OSError.
        """
        self._ahead.close()
        try:
            self._check()
            for each in self._maps:
                if (memory := each()) is not None:
                    detach_file(memory)
            self._check()  # of what was copied too
        finally:
            self.drop()

    def drop(self) -> None:
        """Read no further, whatever is in use."""
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
        """Open, the same whatever has its name by now, and where its data begin. Raises OSError, CheckpointError."""
        with self._lock:
            if path not in self._files:
                file = path.open("rb", buffering=0)
                self._files[path] = file, start_of(path), _signature(file)
            return self._files[path][:2]


def extents_of(tensors: Tensors, names: Sequence[str]) -> list[Extent]:
    """Of those names, as they lie in the files: a layer's, of EXTENT_BYTES at most, without a gap. What is larger is
    one of its own.
    """
    found: list[list[str]] = []
    together: list[str] = []
    for name in sorted(names, key=lambda name: (tensors[name][0], tensors[name][1].begin, tensors[name][1].end)):
        path, info = tensors[name]
        if not together or (
            (path, info.begin) != (tensors[together[0]][0], tensors[together[-1]][1].end)
            or _layer(name) != _layer(together[0])
            or info.end - tensors[together[0]][1].begin > EXTENT_BYTES
        ):
            found.append(together := [])
        together.append(name)
    return [Extent(tensors, each) for each in found]


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return name if found is None else found[0]


def runs_of(tensors: Tensors, names: Sequence[str]) -> Iterator[Run]:
    """Pieces of neighbours, as many as are read at once."""
    run: list[Piece] = []
    for piece in pieces_of(tensors, names):
        if run and piece.end - run[0].begin > RUN_BYTES:
            yield tuple(run)
            run = []
        run.append(piece)
    if run:
        yield tuple(run)


def _signature(file: FileIO) -> tuple[int, int]:
    """That differs once it was written to, but not for another name or owner of it."""
    it = os.fstat(file.fileno())
    return it.st_size, it.st_mtime_ns
