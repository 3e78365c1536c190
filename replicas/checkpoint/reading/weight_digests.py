"""Digest of a model's weights from their bytes: SHA-256 in pieces, which threads and ranks divide among them.

The digest covers names, dtypes, shapes and contents, and does not depend on how files and ranks divide them. It is a
tree: a piece's digest is that of its leaves' digests, a tensor's is that of its pieces', and the total is that of
the tensors'. Leaves are equally long, so that a core hashes several at a time (kernels/cpu/c_kernels/sha256.py);
hashlib gives the same, more slowly.

SHA-256 was chosen because two contents with one digest would let an attacker pass off KV of other weights as this
model's. xxh3 is faster, and no proof against that; BLAKE3 is a package that a machine may lack, and no standard library
has it.
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

from ....kernels.cpu.c_kernels.sha256 import each_digest as each_leaf
from ...errors import CheckpointError
from ...host.cpu_cores import usable_cores
from ..files.safetensors_header import PREFIX_BYTES, TensorInfo, read_header_length

PIECE_BYTES = 4 << 20  # bytes that a thread digests at a time
LEAF_BYTES = 64 << 10

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)
Tensors = Mapping[str, tuple[Path, TensorInfo]]
MapBytes = Callable[[int, int], memoryview]


@dataclass(frozen=True, slots=True)
class DigestPiece:
    """Bytes [begin, end) of the data of a weight file, which are digested together."""

    name: str
    path: Path
    begin: int
    end: int


def digest_tensors(
    tensors: Tensors,
    names: Iterable[str],
    progress: Progress | None = None,
    *,
    threads: int | None = None,
    mapped: MapBytes | None = None,
    piece_digests: Mapping[int, bytes] | None = None,
) -> bytes:
    """Return the digest of the named tensors.

    threads        None: one for each core; 1: the caller's alone
    mapped         returns bytes [begin, end) of the data of the only file there is, which is then not read
    piece_digests  digests of that file's pieces, by the offset where they begin, which need not be computed

    Raises CheckpointError if a file has changed since its header was read.
    """
    wanted = sorted(names)
    found = digest_pieces(
        tensors, wanted, progress=progress, threads=threads, mapped=mapped, piece_digests=piece_digests
    )
    return combine_piece_digests(tensors, wanted, found)


def digest_pieces(
    tensors: Tensors,
    names: Iterable[str],
    numbers: Collection[int] | None = None,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    mapped: MapBytes | None = None,
    piece_digests: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """Return SHA-256 digests of pieces of a checkpoint's weights, in the order of their numbers.

    Pieces are read in another order, that of the files, which is faster.

    numbers        numbers of the pieces that are wanted; None: all
    progress       is told the bytes that have been read
    threads        number of threads that read and hash
    mapped         returns bytes [begin, end) of the data of the only file there is, which is then not read
    piece_digests  digests of that file's pieces, by the offset where they begin, which need not be computed
    """
    pieces = list(tensor_pieces(tensors, sorted(names)))
    if numbers is not None:
        pieces = [pieces[number] for number in sorted(numbers)]
    starts = {path: tensor_data_start(path) for path in {piece.path for piece in pieces}} if mapped is None else {}
    threads = threads or usable_cores()
    # The buffers are mapped, so that the system gets them back: memory that an allocator frees stays the process's.
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(threads if mapped is None else 0):
        buffers.put(mmap.mmap(-1, PIECE_BYTES))

    def digest(piece: DigestPiece) -> bytes:
        if piece_digests is not None and piece.begin in piece_digests and piece.begin != piece.end:
            return piece_digests[piece.begin]
        if mapped is not None:
            with mapped(piece.begin, piece.end) as part:
                return digest_piece(part)
        buffer = buffers.get()
        try:
            with memoryview(buffer)[: piece.end - piece.begin] as part:
                read_piece(piece, starts[piece.path] + piece.begin, part)
                return digest_piece(part)
        finally:
            buffers.put(buffer)

    total = sum(piece.end - piece.begin for piece in pieces)
    done = 0
    found = [b""] * len(pieces)
    as_they_lie = sorted(range(len(pieces)), key=lambda number: (pieces[number].path, pieces[number].begin))
    with ThreadPoolExecutor(threads) as pool:
        # One thread goes without the pool, which takes no work once the interpreter is about to end.
        side_by_side = map if threads == 1 else pool.map
        digests = side_by_side(lambda number: digest(pieces[number]), as_they_lie)
        for number, found[number] in zip(as_they_lie, digests, strict=True):
            done += pieces[number].end - pieces[number].begin
            if progress is not None:
                progress(done, total)
    while not buffers.empty():
        buffers.get().close()
    return found


def digest_piece(data: memoryview) -> bytes:
    """Return the digest of a piece's bytes. `data` must be a writable buffer."""
    return hashlib.sha256(each_leaf(data, LEAF_BYTES)).digest()


def combine_piece_digests(tensors: Tensors, names: Iterable[str], found: Iterable[bytes]) -> bytes:
    """Return the digest of all named tensors, from the digests of their pieces."""
    return combine_tensor_digests(tensors, digests_by_tensor(tensors, names, found))


def digests_by_tensor(tensors: Tensors, names: Iterable[str], found: Iterable[bytes]) -> dict[str, bytes]:
    """Return the digest of each tensor's bytes by name, from the digests of all pieces in order."""
    wanted = sorted(names)
    parts: dict[str, list[bytes]] = {name: [] for name in wanted}
    for piece, digest in zip(tensor_pieces(tensors, wanted), found, strict=True):
        parts[piece.name].append(digest)
    return {name: combine_tensor_pieces(found) for name, found in parts.items()}


def order_piece_digests(by_process: Sequence[Sequence[bytes]], owners: Iterable[int]) -> Iterator[bytes]:
    """Merge the piece digests that several processes have computed into the order of the pieces.

    by_process  for each process, the digests of its own pieces, in order
    owners      for each piece, the process that computed its digest
    """
    left = [iter(each) for each in by_process]
    for owner in owners:
        yield next(left[owner])
    assert all(next(each, None) is None for each in left), "a process has digested pieces of another process"


def combine_tensor_pieces(pieces: Iterable[bytes]) -> bytes:
    """Return the digest of a tensor's bytes, from the digests of its pieces in order."""
    return hashlib.sha256(b"".join(pieces)).digest()


def combine_tensor_digests(tensors: Tensors, digests: Mapping[str, bytes]) -> bytes:
    """Return the digest of all tensors that `digests` has digests of."""
    total = hashlib.sha256()
    for name in sorted(digests):
        info = tensors[name][1]
        described = f"{name}\0{info.dtype}{info.shape}".encode()
        total.update(len(described).to_bytes(4, "little") + described + digests[name])
    return total.digest()


def tensor_pieces(tensors: Tensors, names: Iterable[str]) -> Iterator[DigestPiece]:
    """Yield the pieces of each named tensor, in order."""
    for name in names:
        path, info = tensors[name]
        for begin in range(info.begin, info.end, PIECE_BYTES):
            yield DigestPiece(name, path, begin, min(begin + PIECE_BYTES, info.end))


def tensor_data_start(path: Path) -> int:
    """Return the offset at which the data of a safetensors file begin."""
    with path.open("rb") as file:
        return PREFIX_BYTES + read_header_length(file.read(PREFIX_BYTES), path.stat().st_size, path.name)


def read_piece(piece: DigestPiece, at: int, into: memoryview, file: FileIO | None = None) -> None:
    """Read a piece's bytes from offset `at` of its file into a buffer; `file` is the open file, if there is one.

    Raises OSError, and CheckpointError if the file is too short.
    """
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
