"""KServe's tensors: names, datatypes, shapes and elements, and their raw form."""

from __future__ import annotations

import itertools
import math
import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ....replicas.errors import InvalidRequest
from ....replicas.short_repr import short_repr
from ...transport.grpc_server.message_limits import MAX_FIELDS, MAX_NUMBERS

BINARY_OUTPUT, BINARY, BINARY_SIZE = "binary_data_output", "binary_data", "binary_data_size"  # parameters
BYTES, BOOL, INT32, INT64, FP32 = "BYTES", "BOOL", "INT32", "INT64", "FP32"
_FORMATS = {BOOL: "?", INT32: "i", INT64: "q", FP32: "f"}  # little-endian
_LENGTH = struct.Struct("<I")  # the length before each element of BYTES

Elements = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor. `elements` are flattened: bytes, bool, int or float by the datatype, as many as the shape says."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: Elements


def bad_tensor(name: str, what: str) -> InvalidRequest:
    shown_name = name[:80]
    return InvalidRequest(f"{shown_name}: {what}", param=shown_name, code="invalid_value")


def checked_tensor(name: str, datatype: str, shape: Sequence[int], elements: Elements) -> Tensor:
    """Return a tensor whose shape fits its elements. Raises InvalidRequest naming it."""
    if any(size < 0 for size in shape) or _count(shape, len(elements)) != len(elements):
        raise bad_tensor(name, f"shape {format_shape(shape)} does not fit its {len(elements)} elements")
    return Tensor(name, datatype, tuple(shape), elements)


def _count(shape: Sequence[int], max_elements: int) -> int:
    """Return the number of elements of a shape. Stops above `max_elements`, since the full product may be arbitrarily
    large.
    """
    if 0 in shape:
        return 0
    counts = itertools.accumulate(shape, operator.mul, initial=1)
    return next((count for count in counts if count > max_elements), None) or math.prod(shape)


def format_shape(shape: Sequence[int]) -> str:
    return short_repr(list(shape))


def from_raw(name: str, datatype: str, data: bytes) -> Elements:
    """Decode the elements of raw contents. Raises InvalidRequest if the bytes are not whole elements, or are too
    many.
    """
    if datatype == BYTES:
        strings = tuple(itertools.islice(_strings(name, data), MAX_FIELDS + 1))
        if len(strings) > MAX_FIELDS:
            raise bad_tensor(name, f"it has more than {MAX_FIELDS} elements; expected at most as many")
        return strings
    code = _FORMATS.get(datatype)
    if code is None:
        raise bad_tensor(
            name, f"datatype {datatype[:40]!r} is not accepted; expected one of BYTES, {', '.join(_FORMATS)}"
        )
    count, rest = divmod(len(data), struct.calcsize(f"<{code}"))
    if count > MAX_NUMBERS:
        raise bad_tensor(name, f"it has {count} elements; expected at most {MAX_NUMBERS}")
    if rest:
        raise bad_tensor(name, f"{len(data)} raw bytes are not whole elements of {datatype}")
    return struct.unpack(f"<{count}{code}", data)


def to_raw(tensor: Tensor) -> bytes:
    if tensor.datatype == BYTES:
        return b"".join([_LENGTH.pack(len(element)) + element for element in tensor.elements])
    return struct.pack(f"<{len(tensor.elements)}{_FORMATS[tensor.datatype]}", *tensor.elements)


def _strings(name: str, data: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        begin = position + _LENGTH.size
        if begin > len(data):
            raise bad_tensor(name, "the raw bytes end within the length of an element")
        (length,) = _LENGTH.unpack_from(data, position)
        position = begin + length
        if position > len(data):
            raise bad_tensor(name, f"an element of {length} bytes is longer than what is left of the raw bytes")
        yield data[begin:position]
