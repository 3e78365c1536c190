"""Reader of tensors from files, which reads each byte from disk once and digests it at the same time.

A whole model that starts on a CPU repacks what it reads, so it reads from mapped files: large tensors that will be
repacked are not copied, and a thread of its own reads ahead. Tensors that are kept as they are, and those for a device
that copies from memory of its own kind, are read straight into that memory. Memory that one tensor has left is used for
the next, since new pages take longer to get than to be read (measured: 0.45 s for each GB, against 0.05).
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

from ....kernels.cpu.memory.lazy_pages import MIN_BYTES
from ....kernels.cpu.memory.mapped_pages import is_mappable
from ...host.cpu_cores import usable_cores
from .file_extents import FileExtent, MappedFiles, PieceRun, group_extents, group_runs
from .read_buffers import AllocateStaging, PinnedReadBuffers, ReadBuffers
from .weight_digests import (
    DigestPiece,
    Tensors,
    combine_tensor_pieces,
    digest_piece,
    read_piece,
    tensor_data_start,
    tensor_pieces,
)

TORCH_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32, "U32": torch.uint32,
}  # fmt: skip
_MANY = 16  # a tensor of at least this many runs is read by several threads
_SOME = 4  # the same for a part of a model, whose tensors are read one after the other


class TensorReader:
    """Reader of the tensors of some files. Safe from several threads.

    order    names, more or less in the order in which they will be read
    digests  whether each tensor that is read whole is digested
    pieces   pieces that are digested if they are read whole, even with only a part of their tensor
    whole    whether all tensors of `order` will be read whole, so that those of an extent are read with the first of
             them
    staging  makes host memory that a device reads by itself, through which tensors go there; None: they stay on the
             host
    extents  names that are read together, as they lie in their files
    """

    def __init__(
        self,
        tensors: Tensors,
        order: Iterable[str] = (),
        *,
        digests: bool = False,
        pieces: Collection[DigestPiece] = (),
        whole: bool = False,
        staging: AllocateStaging | None = None,
    ) -> None:
        self._tensors, self._digests, self._pieces = tensors, digests, frozenset(pieces)
        self._digested: dict[DigestPiece, bytes] = {}
        self._found: dict[str, bytes] = {}
        self._starts: dict[Path, int] = {}
        self._buffers = ReadBuffers() if staging is None else PinnedReadBuffers(staging)
        names = [name for name in order if name in tensors and tensors[name][1].dtype in TORCH_DTYPES] if whole else []
        extents = group_extents(tensors, names)
        self.extents = [extent.names for extent in extents]
        self._extents = {name: extent for extent in extents for name in extent.names}
        self._files: MappedFiles | None = None
        if extents and staging is None and all(map(is_mappable, {extent.path for extent in extents})):
            self._files = MappedFiles(dict.fromkeys(self._extents[name] for name in names))

    @property
    def weight_digests(self) -> Mapping[str, bytes]:
        """Digest of each tensor that was read whole, in the format of `weight_digests.digests_by_tensor`."""
        return self._found

    @property
    def digested(self) -> Mapping[DigestPiece, bytes]:
        """Digest of each of `pieces` that was read whole."""
        return self._digested

    def whole(self, name: str, *, retained: bool = False) -> torch.Tensor:
        """Return a whole tensor. kept: it is kept as it is, for longer than this reader. Raises CheckpointError,
        OSError.
        """
        info = self._tensors[name][1]
        extent = self._extents.get(name)
        found = None if extent is None else self._of_extent(extent, name, retained)
        if found is None:
            found = self._read([name], list(group_runs(self._tensors, [name])))
        return found.view(TORCH_DTYPES[info.dtype]).view(info.shape)

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of a tensor, reading no other byte of it. Raises CheckpointError, OSError."""
        info = self._tensors[name][1]
        row_bytes = info.nbytes // max(1, info.shape[0])
        begin, end = info.begin + first * row_bytes, info.begin + last * row_bytes
        memory = self._buffers.take(end - begin)
        # Cut where the whole tensor is cut, so that all pieces but those at the ends are the tensor's own.
        cut = (
            replace(each, begin=max(each.begin, begin), end=min(each.end, end))
            for each in tensor_pieces(self._tensors, [name])
        )
        self._read_runs([(piece,) for piece in cut if piece.begin < piece.end], memory, begin)
        return _tensor(memory, info.dtype, (last - first, *info.shape[1:]))

    def close(self) -> None:
        """Free memory that is not in use; tensors that are in use no longer depend on the files.

        Raises CheckpointError if a file has changed meanwhile, OSError.
        """
        self._forget()
        if self._files is not None:
            self._files.close()

    def stop(self) -> None:
        """Stop reading tensors, whether or not everything was read."""
        self._forget()
        if self._files is not None:
            self._files.drop()

    def _forget(self) -> None:
        """Drop tensors that were read and not taken, and memory that is free."""
        self._buffers.close()
        for extent in self._extents.values():
            extent.map = extent.read = None

    def _of_extent(self, extent: FileExtent, name: str, retained: bool) -> torch.Tensor | None:
        """Return a tensor of an extent as uint8; None if it was returned before."""
        with extent.lock:
            if name not in extent.left:
                return None
            if extent.read is None:
                extent.read = self._read(extent.names, extent.runs, extent, copied=retained and len(extent.names) == 1)
            info = self._tensors[name][1]
            part = extent.read[info.begin - extent.begin : info.end - extent.begin]
            extent.left.discard(name)
            if not extent.left:
                extent.read = None  # its memory is freed with the last tensor over it
        # A small tensor may be kept as it is, and would then keep the whole extent's memory.
        size = TORCH_DTYPES[info.dtype].itemsize
        small = info.nbytes < MIN_BYTES or part.data_ptr() % size or part.storage_offset() % size
        return part.clone() if small else part

    def _read(
        self, names: Sequence[str], runs: Sequence[PieceRun], extent: FileExtent | None = None, *, copied: bool = False
    ) -> torch.Tensor:
        """Read neighbouring tensors as one of dtype uint8. copied: into memory that no other tensor uses."""
        first = self._tensors[names[0]][1].begin
        nbytes = self._tensors[names[-1]][1].end - first
        files = None if extent is None else self._files
        if files is not None and extent is not None and nbytes and not copied:
            memory, copied = files.view(extent), False
        else:
            memory, copied = self._buffers.take(nbytes), True
        found = self._read_runs(runs, memory, first, files, copied=copied, together=len(names) > 1)
        if self._digests:
            pieces: dict[str, list[bytes]] = {name: [] for name in names}
            for piece, digest in found.items():
                pieces[piece.name].append(digest)
            self._found.update({name: combine_tensor_pieces(digests) for name, digests in pieces.items()})
        if extent is not None:
            extent.map = None  # the map is freed with the tensors over it
        return torch.frombuffer(memory, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)

    def _read_runs(
        self,
        runs: Sequence[PieceRun],
        memory: memoryview,
        first: int,
        files: MappedFiles | None = None,
        *,
        copied: bool = True,
        together: bool = False,
    ) -> dict[DigestPiece, bytes]:
        """Read runs of a file into memory that begins at byte `first` of its data; return the digests of the pieces
        that need one, in order.

        files     mapped files that are open and read ahead
        copied    False: `memory` is the map of the file itself
        together  whether the runs are of several tensors, while other threads read others
        """
        if not runs:
            return {}
        name, path = runs[0][0].name, runs[0][0].path

        def read(run: PieceRun) -> list[tuple[DigestPiece, bytes]]:
            begin, end = run[0].begin, run[-1].end
            with nullcontext() if files is None else files.brought(run), memory[begin - first : end - first] as part:
                if copied:
                    read_piece(DigestPiece(run[0].name, path, begin, end), start + begin, part, file)
                wanted = [piece for piece in run if self._digests or piece in self._pieces]
                return [(piece, _digest(part[piece.begin - begin : piece.end - begin])) for piece in wanted]

        threads = min(usable_cores(), len(runs))
        with ExitStack() as stack:
            if files is not None:
                file, start = files.file(path)
            else:  # opened once, since the system reads ahead in consecutive data of one open file
                file, start = stack.enter_context(path.open("rb", buffering=0)), self._begin(name)
            if together or len(runs) < (_SOME if self._pieces else _MANY) or threads == 1:
                found = dict(chain.from_iterable(map(read, runs)))
            else:
                with ThreadPoolExecutor(threads) as pool:
                    found = dict(chain.from_iterable(pool.map(read, runs)))
        self._digested.update({piece: digest for piece, digest in found.items() if piece in self._pieces})
        return found

    def _begin(self, name: str) -> int:
        """Return the offset at which the data of the tensor's file begin."""
        path = self._tensors[name][0]
        if path not in self._starts:
            self._starts[path] = tensor_data_start(path)
        return self._starts[path]


def _digest(part: memoryview) -> bytes:
    with part:
        return digest_piece(part)


def _tensor(memory: memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    if not len(memory):
        return torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype]).view(tuple(shape))
