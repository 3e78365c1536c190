"""What a model's weights are, told from their bytes: SHA-256 in pieces, which threads and ranks divide among them.

The digest is of names, types, shapes and contents, however files and ranks divide them. It is a tree: a piece is the
digest of its leaves' digests, a tensor that of its pieces', and all of them together that of the tensors'. Leaves are
equally long, so that a core takes several at a time (kernels/cpu/c_kernels/sha256.py); hashlib finds the same,
more slowly.

Why SHA-256: whoever finds two contents with one digest could pass off KV of other weights as this model's. xxh3 is
faster, and no proof against that; BLAKE3 is a package that a machine may lack, and no standard library has it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

from ..kernels.cpu.c_kernels.sha256 import each_digest as each_leaf
from .cores import usable_cores
from .errors import CheckpointError
from .safetensors_file import PREFIX_BYTES, TensorInfo, header_bytes

__all__ = [
    "Piece", "Tensors", "combined", "digest_of", "each_digest", "in_order", "of_piece", "of_tensor", "piece_digests",
    "pieces_of", "read_piece", "start_of", "together",
]  # fmt: skip

PIECE_BYTES = 4 << 20  # a thread's at a time
LEAF_BYTES = 64 << 10

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)
Tensors = Mapping[str, tuple[Path, TensorInfo]]
Mapped = Callable[[int, int], memoryview]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of the data of a file."""

    name: str
    path: Path
    begin: int
    end: int


def digest_of(
    tensors: Tensors,
    names: Iterable[str],
    progress: Progress | None = None,
    *,
    threads: int | None = None,
    mapped: Mapped | None = None,
    known: Mapping[int, bytes] | None = None,
) -> bytes:
    """Of those tensors. threads: None: one for each core; 1: the caller's alone.

    mapped  gives bytes [begin, end) of the data of the only file there is, which is then not read
    known   of that file, digests of pieces by where they begin, which need not be found

    Raises CheckpointError if a file has changed since its header was read.
    """
    wanted = sorted(names)
    found = piece_digests(tensors, wanted, progress=progress, threads=threads, mapped=mapped, known=known)
    return combined(tensors, wanted, found)


def piece_digests(
    tensors: Tensors,
    names: Iterable[str],
    numbers: Collection[int] | None = None,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    mapped: Mapped | None = None,
    known: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """SHA-256 of the pieces of those numbers, or of all, in order; they are read as they lie in the files."""
    pieces = list(pieces_of(tensors, sorted(names)))
    if numbers is not None:
        pieces = [pieces[number] for number in sorted(numbers)]
    starts = {path: start_of(path) for path in {piece.path for piece in pieces}} if mapped is None else {}
    threads = threads or usable_cores()
    # Mapped, so that they are given back: what an allocator frees stays the process's.
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(threads if mapped is None else 0):
        buffers.put(mmap.mmap(-1, PIECE_BYTES))

    def digest(piece: Piece) -> bytes:
        if known is not None and piece.begin in known and piece.begin != piece.end:
            return known[piece.begin]
        if mapped is not None:
            with mapped(piece.begin, piece.end) as part:
                return of_piece(part)
        buffer = buffers.get()
        try:
            with memoryview(buffer)[: piece.end - piece.begin] as part:
                read_piece(piece, starts[piece.path] + piece.begin, part)
                return of_piece(part)
        finally:
            buffers.put(buffer)

    total = sum(piece.end - piece.begin for piece in pieces)
    done = 0
    found = [b""] * len(pieces)
    as_they_lie = sorted(range(len(pieces)), key=lambda number: (pieces[number].path, pieces[number].begin))
    with ThreadPoolExecutor(threads) as pool:
        # Without the pool for one thread: none takes work once the interpreter is about to end.
        side_by_side = map if threads == 1 else pool.map
        digests = side_by_side(lambda number: digest(pieces[number]), as_they_lie)
        for number, found[number] in zip(as_they_lie, digests, strict=True):
            done += pieces[number].end - pieces[number].begin
            if progress is not None:
                progress(done, total)
    while not buffers.empty():
        buffers.get().close()
    return found


def of_piece(data: memoryview) -> bytes:
    """The digest of a piece, which may be written to."""
    return hashlib.sha256(each_leaf(data, LEAF_BYTES)).digest()


def combined(tensors: Tensors, names: Iterable[str], found: Iterable[bytes]) -> bytes:
    """The digest of all, from those of their pieces."""
    return together(tensors, each_digest(tensors, names, found))


def each_digest(tensors: Tensors, names: Iterable[str], found: Iterable[bytes]) -> dict[str, bytes]:
    """Of each tensor's bytes, from those of its pieces, in order."""
    wanted = sorted(names)
    parts: dict[str, list[bytes]] = {name: [] for name in wanted}
    for piece, digest in zip(pieces_of(tensors, wanted), found, strict=True):
        parts[piece.name].append(digest)
    return {name: of_tensor(found) for name, found in parts.items()}


def in_order(by_process: Sequence[Sequence[bytes]], owners: Iterable[int]) -> Iterator[bytes]:
    """Digests of all pieces, of which each process has found its own. owners: of each piece its process."""
    left = [iter(each) for each in by_process]
    for owner in owners:
        yield next(left[owner])
    assert all(next(each, None) is None for each in left), "a process has found what is not its own"


def of_tensor(pieces: Iterable[bytes]) -> bytes:
    """The digest of a tensor's bytes, from those of its pieces, in order."""
    return hashlib.sha256(b"".join(pieces)).digest()


def together(tensors: Tensors, digests: Mapping[str, bytes]) -> bytes:
    """The digest of all tensors that there are digests of."""
    total = hashlib.sha256()
    for name in sorted(digests):
        info = tensors[name][1]
        described = f"{name}\0{info.dtype}{info.shape}".encode()
        total.update(len(described).to_bytes(4, "little") + described + digests[name])
    return total.digest()


def pieces_of(tensors: Tensors, names: Iterable[str]) -> Iterator[Piece]:
    """Of each tensor, in order."""
    for name in names:
        path, info = tensors[name]
        for begin in range(info.begin, info.end, PIECE_BYTES):
            yield Piece(name, path, begin, min(begin + PIECE_BYTES, info.end))


def start_of(path: Path) -> int:
    """Where the data of a file begins."""
    with path.open("rb") as file:
        return PREFIX_BYTES + header_bytes(file.read(PREFIX_BYTES), path.stat().st_size, path.name)


def read_piece(piece: Piece, at: int, into: memoryview, file: FileIO | None = None) -> None:
    """From there in its file, which may be open already. Raises CheckpointError where it ends before, OSError."""
    if file is None:
        with piece.path.open("rb", buffering=0) as opened:
            return read_piece(piece, at, into, opened)
    done = 0
    while done < len(into):
        count = os.preadv(file.fileno(), [into[done:]], at + done)
        if not count:
            raise CheckpointError("is shorter than its header says", file=piece.path.name, tensor=piece.name)
        done += count
    return None
