"""Tensors as files have them, each byte of which is asked of the disk once, and digested on the way.

A start of a whole model on a CPU repacks what it reads, so that it reads from mapped files: what is large and will be
repacked is not copied, and a thread of its own asks the disk ahead. What is kept as it is, and what goes to a device
that copies from memory of its own kind, is read straight into that. Memory that one has left is the next one's, since
pages that a process never had take longer to come than to be read (measured: 0.45 s for each GB, beside 0.05).
Tensors of a layer that lie together in a file are read together: a layer's quantization is some thirty small ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from ..kernels.cpu.memory.lazy_pages import MIN_BYTES
from ..kernels.cpu.memory.mapped_pages import is_mappable
from .contents import Piece, Tensors, of_piece, of_tensor, pieces_of, read_piece, start_of
from .cores import usable_cores
from .extents import Extent, MappedFiles, Run, extents_of, runs_of
from .reading_rooms import Pinned, Rooms, Staging

__all__ = ["DTYPES", "Reader"]

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32, "U32": torch.uint32,
}  # fmt: skip
_MANY = 16  # runs of a tensor, from which on several threads read it, beside other tensors
_SOME = 4  # likewise of a tensor of a part of a model, which are read one after the other


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
        names = [name for name in order if name in tensors and tensors[name][1].dtype in DTYPES] if whole else []
        extents = extents_of(tensors, names)
        self.extents = [extent.names for extent in extents]
        self._extents = {name: extent for extent in extents for name in extent.names}
        self._files: MappedFiles | None = None
        if extents and staging is None and all(map(is_mappable, {extent.path for extent in extents})):
            self._files = MappedFiles(dict.fromkeys(self._extents[name] for name in names))

    @property
    def contents(self) -> Mapping[str, bytes]:
        """The digest of each tensor that was read whole, as `contents.each_digest` has it."""
        return self._found

    @property
    def digested(self) -> Mapping[Piece, bytes]:
        """The digest of each of `pieces` that was read whole."""
        return self._digested

    def whole(self, name: str, *, kept: bool = False) -> torch.Tensor:
        """kept: as it is, for longer than this reader. Raises CheckpointError, OSError."""
        info = self._tensors[name][1]
        extent = self._extents.get(name)
        found = None if extent is None else self._of_extent(extent, name, kept)
        if found is None:
            found = self._read([name], list(runs_of(self._tensors, [name])))
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
        self._read_runs([(piece,) for piece in cut if piece.begin < piece.end], memory, begin)
        return _tensor(memory, info.dtype, (last - first, *info.shape[1:]))

    def close(self) -> None:
        """Give back what is not in use; nothing that is depends on the files any more.

        Raises CheckpointError where a file has changed meanwhile, OSError.
        """
        self._forget()
        if self._files is not None:
            self._files.close()

    def stop(self) -> None:
        """Nothing more will be read, if it came to an end or not."""
        self._forget()
        if self._files is not None:
            self._files.drop()

    def _forget(self) -> None:
        """What nobody has taken, or has left."""
        self._rooms.close()
        for extent in self._extents.values():
            extent.map = extent.read = None

    def _of_extent(self, extent: Extent, name: str, kept: bool) -> torch.Tensor | None:
        """uint8; None: it was given before."""
        with extent.lock:
            if name not in extent.left:
                return None
            if extent.read is None:
                extent.read = self._read(extent.names, extent.runs, extent, copied=kept and len(extent.names) == 1)
            info = self._tensors[name][1]
            part = extent.read[info.begin - extent.begin : info.end - extent.begin]
            extent.left.discard(name)
            if not extent.left:
                extent.read = None  # its memory goes with the last tensor over it
        # What is small may be kept as it is, and would keep all.
        size = DTYPES[info.dtype].itemsize
        small = info.nbytes < MIN_BYTES or part.data_ptr() % size or part.storage_offset() % size
        return part.clone() if small else part

    def _read(
        self, names: Sequence[str], runs: Sequence[Run], extent: Extent | None = None, *, copied: bool = False
    ) -> torch.Tensor:
        """Of neighbours, uint8. copied: into memory that is nobody else's."""
        first = self._tensors[names[0]][1].begin
        nbytes = self._tensors[names[-1]][1].end - first
        files = None if extent is None else self._files
        if files is not None and extent is not None and nbytes and not copied:
            memory, copied = files.view(extent), False
        else:
            memory, copied = self._rooms.take(nbytes), True
        found = self._read_runs(runs, memory, first, files, copied=copied, together=len(names) > 1)
        if self._digests:
            pieces: dict[str, list[bytes]] = {name: [] for name in names}
            for piece, digest in found.items():
                pieces[piece.name].append(digest)
            self._found.update({name: of_tensor(digests) for name, digests in pieces.items()})
        if extent is not None:
            extent.map = None  # it goes with what is over it
        return torch.frombuffer(memory, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)

    def _read_runs(
        self,
        runs: Sequence[Run],
        memory: memoryview,
        first: int,
        files: MappedFiles | None = None,
        *,
        copied: bool = True,
        together: bool = False,
    ) -> dict[Piece, bytes]:
        """Of a file, into memory that begins with that byte of its data. In order, digests of what shall have one.

        files: that have been opened, and are read ahead of
        copied: else that memory is the file's own
        together: of several tensors, beside which others are read
        """
        if not runs:
            return {}
        name, path = runs[0][0].name, runs[0][0].path

        def read(run: Run) -> list[tuple[Piece, bytes]]:
            begin, end = run[0].begin, run[-1].end
            with nullcontext() if files is None else files.brought(run), memory[begin - first : end - first] as part:
                if copied:
                    read_piece(Piece(run[0].name, path, begin, end), start + begin, part, file)
                wanted = [piece for piece in run if self._digests or piece in self._pieces]
                return [(piece, _digest(part[piece.begin - begin : piece.end - begin])) for piece in wanted]

        threads = min(usable_cores(), len(runs))
        with ExitStack() as stack:
            if files is not None:
                file, start = files.file(path)
            else:  # once: the system reads ahead of what comes in a row
                file, start = stack.enter_context(path.open("rb", buffering=0)), self._begin(name)
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


def _digest(part: memoryview) -> bytes:
    with part:
        return of_piece(part)


def _tensor(memory: memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    if not len(memory):
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    return torch.frombuffer(memory, dtype=DTYPES[dtype]).view(tuple(shape))
