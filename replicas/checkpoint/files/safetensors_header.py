"""Header of a safetensors file, checked to the last byte before anything is mapped.

    8 bytes            H bytes      the rest
    |<- H, uint64 ->|<- JSON ->|<- tensor data: [begin, end) of every tensor, gapless, to the end ->|

The JSON maps each tensor's name to dtype, shape and data_offsets; "__metadata__" maps strings to strings.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import CheckpointError
from .checkpoint_folder import GIT_LFS, open_checkpoint_file, pointer_error
from .json_fields import parse_json

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the cap that the format's own library applies
_MAX_ELEMENTS = 1 << 62
DTYPE_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32},
    **{"U64": 64, "I64": 64, "F64": 64},
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Header entry of a tensor: dtype as the format names it; data bytes [begin, end) from the start of the tensor
    data.

    stored  its name in the file, if the model has another for it
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    stored: str = ""

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a file by name, reading none of their data. Raises CheckpointError naming file and
    tensor.
    """
    with open_checkpoint_file(path.parent, path.name) as (file, size):
        return parse_header(file, size, path.name)[0]


def parse_header(file: BinaryIO, size: int, name: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors and the metadata of a file of `size` bytes, read from its start. Raises CheckpointError."""
    data = read_header_length(file.read(PREFIX_BYTES), size, name)
    header = parse_json(file.read(data), name)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError("must map strings to strings", file=name, tensor="__metadata__")
    tensors = {each: _tensor(each, entry, name) for each, entry in header.items()}
    _check_layout(tensors, size - PREFIX_BYTES - data, name)
    return tensors, metadata


def read_header_length(prefix: bytes, size: int, file: str) -> int:
    """Return the length of a safetensors header. Raises CheckpointError unless it lies within the file."""
    if len(prefix) < PREFIX_BYTES:
        raise CheckpointError(f"truncated: its {size} bytes hold no header; download it again", file=file)
    if prefix == GIT_LFS[:PREFIX_BYTES]:
        raise pointer_error(file)
    length = int(struct.unpack("<Q", prefix)[0])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"header length {length} is above the cap of {MAX_HEADER_BYTES}", file=file)
    if PREFIX_BYTES + length > size:
        raise CheckpointError(f"truncated: header of {length} bytes in a file of {size}", file=file)
    return length


def _tensor(name: str, entry: Any, file: str) -> TensorInfo:
    def bad(problem: str) -> CheckpointError:
        return CheckpointError(problem, file=file, tensor=name)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("its entry must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"dtype {str(dtype)[:40]!r} is unknown; expected one of {', '.join(DTYPE_BITS)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise bad("shape and data_offsets must be lists of integers from 0")
    elements = math.prod(shape)
    if elements > _MAX_ELEMENTS:
        raise bad(f"the product of its shape {str(shape)[:80]} overflows")
    begin, end = offsets
    if end - begin != elements * DTYPE_BITS[dtype] // 8:
        raise bad(f"data_offsets {offsets} do not fit {dtype} {shape}")
    return TensorInfo(dtype, tuple(shape), begin, end)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(tensors: dict[str, TensorInfo], data_bytes: int, file: str) -> None:
    """Check that tensors follow each other without gap or overlap and end where the file ends. Raises
    CheckpointError.
    """
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            problem = "overlaps the tensor before it" if info.begin < position else "leaves a gap before it"
            raise CheckpointError(f"{problem}, at byte {info.begin}", file=file, tensor=name)
        if info.end > data_bytes:
            problem = f"truncated: ends at byte {info.end} of {data_bytes}"
            raise CheckpointError(problem, file=file, tensor=name)
        position = info.end
    if position != data_bytes:
        raise CheckpointError(f"{data_bytes - position} trailing bytes after the last tensor", file=file)
