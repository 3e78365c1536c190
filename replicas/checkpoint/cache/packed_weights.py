"""File of repacked weights: safetensors, laid out so that it can be mapped, with digests of all that is in it.

Tensors begin at multiples of 64 bytes, which kernels may rely on; gaps are filled by tensors named "pad.N".

    metadata  "key": what it was made from and for; "tree": the layers and their sizes, JSON; "choices": JSON;
              "contents": digest of the tensors (weight_digests.py); "sum": SHA-256 of the other four
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ....kernels.cpu.memory.mapped_pages import populate_pages
from ....kernels.packed_layer import PackedLayer
from ...errors import CheckpointError
from ..files.safetensors_header import PREFIX_BYTES, TensorInfo, parse_header
from ..reading.read_ahead import ReadAhead
from ..reading.weight_digests import Tensors, digest_tensors, tensor_pieces
from .packed_prefetch import take_packed_prefetch

ALIGNMENT = 64
_PAGE = 4096
_DIGEST_CHARS = 64
UNPACKED_PREFIX = "tensor/"  # prefix of the names of tensors that belong to no layer
_NAME_OF_DTYPE = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
PACKED_DTYPES = {name: dtype for dtype, name in _NAME_OF_DTYPE.items()}


def align_up(nbytes: int) -> int:
    """Round a number of bytes up to the file's alignment, at which the next tensor begins."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class PackedWeightsError(Exception):
    """Error that says what is wrong with a file of repacked weights."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Contents of a file of repacked weights: tensors by name; packed layers, each by its name in the checkpoint; and
    what was chosen for them -> why.
    """

    tensors: Mapping[str, torch.Tensor]
    packed: Mapping[str, list[PackedLayer]]
    choices: Mapping[str, str]


def write_packed_weights(file: BinaryIO, key: str, weights: PackedWeights) -> None:
    """Write repacked weights to an empty file that is open for reading too. Raises OSError."""
    tensors, tree = _flatten_tensors(weights)
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        end = _add_entry(entries, name, tensor, end)
    writer = PackedWeightsWriter(file, len(_header(entries, _metadata(key, tree, weights.choices))))
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish(key, tree, weights.choices)


class PackedWeightsWriter:
    """Writer of a file of repacked weights, tensor by tensor, without holding any of them: the header is written
    last.
    """

    def __init__(self, file: BinaryIO, header_bytes: int) -> None:
        """Prepare to write the data behind the space for the header.

        file          empty, and open for reading too
        header_bytes  bytes for the header, whole pages

        Raises OSError.
        """
        assert header_bytes % _PAGE == 0, "the data begin with a page"
        self._file, self._header_bytes = file, header_bytes
        self._entries: dict[str, Any] = {}
        self._end = 0
        file.seek(header_bytes)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor under a name. Raises OSError."""
        data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        end = _add_entry(self._entries, name, tensor, self._end)
        self._file.write(data)
        self._file.write(bytes(end - self._end - tensor.nbytes))
        self._end = end

    def mapped(self, name: str) -> torch.Tensor:
        """Return the tensor that was written under that name, mapped from the file: its pages can be given back."""
        self._file.flush()
        begin, end = (self._header_bytes + each for each in self._entries[name]["data_offsets"])
        first = begin // _PAGE * _PAGE
        memory = mmap.mmap(self._file.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first)
        entry = self._entries[name]
        return tensor_view(memory, begin - first, TensorInfo(entry["dtype"], tuple(entry["shape"]), 0, end - begin))

    def finish(self, key: str, tree: Mapping[str, Any], choices: Mapping[str, str]) -> None:
        """Write the header, with the digests. Raises OSError, and PackedWeightsError if the header does not fit."""
        file, metadata = self._file, _metadata(key, tree, choices)
        file.seek(0)
        file.write(_header(self._entries, metadata, self._header_bytes))
        file.flush()
        path = Path(f"/proc/self/fd/{file.fileno()}")
        file.seek(0)
        found, _ = parse_header(file, os.fstat(file.fileno()).st_size, "kept weights")
        metadata["contents"] = digest_tensors(
            {name: (path, info) for name, info in found.items()}, found, threads=1
        ).hex()
        del metadata["sum"]
        file.seek(0)
        file.write(_header(self._entries, metadata | {"sum": _metadata_digest(metadata)}, self._header_bytes))
        file.flush()


@dataclass(frozen=True, slots=True)
class PackedWeightsIndex:
    """Index of a file that is known to hold what was written: nothing of the file itself is in memory.

    start    offset of the tensors' data in the file, a multiple of pages
    tensors  by the names of the file; offsets are from `start`
    tree     packed layers: their kernels, sizes, and names of their tensors
    """

    start: int
    tensors: Mapping[str, TensorInfo]
    tree: Mapping[str, Any]
    choices: Mapping[str, str]

    def packed(self, name: str, tensors: Callable[[str], torch.Tensor]) -> list[PackedLayer]:
        """Return a packed layer. `tensors` is called with the file's names."""
        return [
            PackedLayer(part["kernel"], part["sizes"], {own: tensors(each) for own, each in part["tensors"].items()})
            for part in self.tree[name]
        ]


def read_packed_weights(descriptor: int, key: str) -> PackedWeights:
    """Map the repacked weights that were written for that key, and check all of them: the file is read once, where it
    is mapped.

    Raises PackedWeightsError, OSError.
    """
    early = take_packed_prefetch(descriptor)
    memory = _map_file(descriptor) if early is None else early.memory
    index = _read_packed_index(descriptor, key, memory, {} if early is None else early.found)
    assert memory is not None, "an empty file has no header"
    tensors = {name: tensor_view(memory, index.start + info.begin, info) for name, info in index.tensors.items()}
    plain = {
        name.removeprefix(UNPACKED_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(UNPACKED_PREFIX)
    }
    return PackedWeights(plain, {name: index.packed(name, tensors.__getitem__) for name in index.tree}, index.choices)


def _map_file(descriptor: int) -> mmap.mmap | None:
    """Map a whole file; pages that are not written to are shared. Returns None for an empty file."""
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) if os.fstat(descriptor).st_size else None


def read_packed_index(descriptor: int, key: str) -> PackedWeightsIndex:
    """Return the index of a file that was written for that key, after checking all of the file. Raises
    PackedWeightsError, OSError.
    """
    return _read_packed_index(descriptor, key, None)


def _read_packed_index(
    descriptor: int, key: str, memory: mmap.mmap | None, piece_digests: Mapping[int, bytes] | None = None
) -> PackedWeightsIndex:
    size = os.fstat(descriptor).st_size
    path = Path(f"/proc/self/fd/{descriptor}")  # names this same file, even if another has its name by now
    try:
        with path.open("rb") as file:
            found, metadata = parse_header(file, size, "kept weights")
        if metadata.get("sum") != _metadata_digest(
            {name: metadata.get(name, "") for name in ("key", "tree", "choices", "contents")}
        ):
            raise PackedWeightsError("its header is damaged")
        if metadata["key"] != key:
            raise PackedWeightsError("it was made for something else")
        start = size - max(info.end for info in found.values())
        tensors = {name: (path, info) for name, info in found.items()}
        with ExitStack() as stack:
            mapped = (
                None
                if memory is None
                else stack.enter_context(_MappedTensorData(memory, start, tensors, piece_digests or {})).part
            )
            if digest_tensors(tensors, found, mapped=mapped, piece_digests=piece_digests).hex() != metadata["contents"]:
                raise PackedWeightsError("its tensors are damaged")
    except CheckpointError as error:
        raise PackedWeightsError(str(error)) from error
    return PackedWeightsIndex(start, found, json.loads(metadata["tree"]), json.loads(metadata["choices"]))


class _MappedTensorData:
    """Data of a mapped file, whose pages are read piece by piece, each before it is digested.

    piece_digests  digests of pieces by the offset where they begin, whose pages are not read here
    """

    def __init__(self, memory: mmap.mmap, start: int, tensors: Tensors, piece_digests: Mapping[int, bytes]) -> None:
        self._memory, self._start = memory, start
        pieces = sorted((piece.begin, piece.end) for piece in tensor_pieces(tensors, sorted(tensors)))
        self._ahead = ReadAhead(
            {span: span[1] - span[0] for span in pieces if span[0] not in piece_digests}, self._bring
        )

    def __enter__(self) -> _MappedTensorData:
        return self

    def __exit__(self, *_: object) -> None:
        self._ahead.close()

    def part(self, begin: int, end: int) -> memoryview:
        self._ahead.wait((begin, end))
        self._ahead.used((begin, end))  # counted as used just before it is digested
        return memoryview(self._memory)[self._start + begin : self._start + end]

    def _bring(self, span: tuple[int, int]) -> None:
        first, last = (self._start + each for each in span)
        populate_pages(self._memory, first // _PAGE * _PAGE, last)  # else page faults read it


def tensor_view(memory: mmap.mmap, offset: int, info: TensorInfo) -> torch.Tensor:
    """Return a tensor of that dtype and shape over the mapped bytes that begin at `offset`."""
    dtype = PACKED_DTYPES[info.dtype]
    return torch.frombuffer(memory, dtype=dtype, count=info.nbytes // dtype.itemsize, offset=offset).view(info.shape)


def _add_entry(entries: dict[str, Any], name: str, tensor: torch.Tensor, begin: int) -> int:
    """Enter a tensor that begins at `begin` into the header, and the padding behind it. Returns where the next one
    begins.
    """
    end = begin + tensor.nbytes
    entries[name] = {"dtype": _NAME_OF_DTYPE[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    if gap := -end % ALIGNMENT:
        entries[f"pad.{len(entries)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
    return end + gap


def _metadata(key: str, tree: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, str]:
    """Return the file's metadata, with zeros in place of the digests, which are computed later."""
    said = {"key": key, "tree": json.dumps(tree), "choices": json.dumps(dict(choices))}
    return said | dict.fromkeys(("contents", "sum"), "0" * _DIGEST_CHARS)


def _header(entries: Mapping[str, Any], metadata: Mapping[str, str], header_bytes: int | None = None) -> bytes:
    """Return the header's bytes as the format defines them, padded with spaces so that the data begin at a page, or
    after `header_bytes` bytes.
    """
    encoded = json.dumps({"__metadata__": dict(metadata), **entries}).encode()
    if header_bytes is not None and PREFIX_BYTES + len(encoded) > header_bytes:
        raise PackedWeightsError(
            f"its header takes {len(encoded)} bytes, more than the {header_bytes} that were left for it"
        )
    encoded += b" " * (
        header_bytes - PREFIX_BYTES - len(encoded) if header_bytes else -(PREFIX_BYTES + len(encoded)) % _PAGE
    )
    return struct.pack("<Q", len(encoded)) + encoded


def _metadata_digest(metadata: Mapping[str, str]) -> str:
    named = json.dumps(dict(metadata), sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()


def _flatten_tensors(weights: PackedWeights) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return all tensors by their names in the file, and the tree that says which layer has which."""
    tensors = {f"{UNPACKED_PREFIX}{name}": tensor for name, tensor in weights.tensors.items()}
    tree: dict[str, Any] = {}
    for name, parts in weights.packed.items():
        tree[name] = layer_entry(name, parts)
        tensors |= dict(packed_tensors(name, parts))
    return tensors, tree


def layer_entry(name: str, parts: Sequence[PackedLayer]) -> list[dict[str, Any]]:
    """Return a packed layer's entry in the tree of the file's metadata."""
    return [
        {
            "kernel": part.kernel,
            "sizes": dict(part.sizes),
            "tensors": {each: f"layer/{name}/{number}/{each}" for each in part.tensors},
        }
        for number, part in enumerate(parts)
    ]


def packed_tensors(name: str, parts: Sequence[PackedLayer]) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield a layer's tensors with the names that the file has for them."""
    for number, part in enumerate(parts):
        for each, tensor in part.tensors.items():
            yield f"layer/{name}/{number}/{each}", tensor
