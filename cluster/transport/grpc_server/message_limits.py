"""Count of the fields of a protobuf message, from its bytes, before it is parsed.

8 MiB may hold four million empty messages: the parser alone would take a second, and block all other requests. This
walk ends at the first field too many; a message that is too short to hold too many is not walked.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ....replicas.errors import InvalidRequest
from ...request_errors import too_many_message

MAX_FIELDS = 32_768  # fields of a message and all messages in it; a run of packed numbers counts as one
MAX_NUMBERS = 2**20  # numbers in all packed runs together: a prompt of a million token ids
_VARINT, _FIXED64, _LENGTH, _GROUP, _GROUP_END, _FIXED32 = range(6)  # wire types
_MAX_VARINT = 10  # bytes
_NOT_LAST = bytes(range(128, 256))  # all bytes of a varint but its last
_WIDTHS = {
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_DOUBLE: 8,
}
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


_MAX_GROUPS = 100  # nested groups, which is the parsers' limit


class _NotAMessage(Exception):
    """Error at bytes that are no message. The parser fails at the same place, and says why."""


def check_message_size(data: bytes, kind: Descriptor) -> int:
    """Return how many fields were visited. Raises InvalidRequest naming the field that is beyond MAX_FIELDS or
    MAX_NUMBERS.
    """
    if len(data) <= MAX_FIELDS:  # each field takes a byte or more
        return 0
    walk = _MessageWalk(data, kind)
    with suppress(_NotAMessage, IndexError):
        walk.to_the_end()
    return walk.fields


class _MessageWalk:
    """Walk over a message's fields. `within`: the end, the kind and the current field's number of each enclosing
    message.
    """

    def __init__(self, data: bytes, kind: Descriptor) -> None:
        self.fields = self.numbers = self._groups = 0
        self._data, self._kind = data, kind
        self._at, self._end = 0, len(data)
        self._within: list[tuple[int, Descriptor, int]] = []

    def to_the_end(self) -> None:
        inner = _inner(self._kind)
        while True:
            while self._at == self._end:
                if not self._within:
                    return
                self._end, self._kind, _ = self._within.pop()
                inner = _inner(self._kind)
            if self._at > self._end:
                raise _NotAMessage
            tag = self._varint()
            number, wire = tag >> 3, tag & 7
            self.fields += 1
            if self.fields > MAX_FIELDS:
                raise self._too_many(number, f"{MAX_FIELDS} fields")
            if wire != _LENGTH:
                self._skip(wire)
                continue
            length = self._varint()
            found = inner.get(number)
            if isinstance(found, Descriptor):
                if self._at + length > self._end:
                    raise _NotAMessage
                self._within.append((self._end, self._kind, number))
                self._end, self._kind, inner = self._at + length, found, _inner(found)
            else:
                if found is not None:
                    self._count(number, length, found)
                self._at += length

    def _varint(self) -> int:
        byte = self._data[self._at]
        self._at += 1
        if byte < 128:
            return byte
        value = byte & 127
        for shift in range(7, 7 * _MAX_VARINT, 7):
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise _NotAMessage

    def _skip(self, wire: int) -> None:
        if wire == _VARINT:
            self._varint()
        elif wire in (_FIXED32, _FIXED64):
            self._at += 4 if wire == _FIXED32 else 8
        elif wire == _GROUP and self._groups < _MAX_GROUPS:  # fields in a group count as the message's own
            self._groups += 1
        elif wire == _GROUP_END:
            self._groups -= 1
        else:
            raise _NotAMessage

    def _count(self, number: int, length: int, width: int) -> None:
        """Count the numbers of a packed run; `width` is each one's bytes, or 0 for varints."""
        run = self._data[self._at : self._at + length]
        self.numbers += length // width if width else len(run.translate(None, _NOT_LAST))
        if self.numbers > MAX_NUMBERS:
            raise self._too_many(number, f"{MAX_NUMBERS} numbers")

    def _too_many(self, number: int, limit: str) -> InvalidRequest:
        path = [(kind, number) for _, kind, number in self._within] + [(self._kind, number)]
        name = ".".join(_name(kind, number) for kind, number in path if not kind.GetOptions().map_entry)
        return InvalidRequest(
            too_many_message(f"{name}: with it the message", limit), param=name, code="too_many_values"
        )


@cache
def _inner(kind: Descriptor) -> dict[int, Any]:
    """Return by field number the kind of a message field, or the width of packed numbers. Texts and bytes are left
    out.
    """
    inner: dict[int, Any] = {}
    for field in kind.fields:
        if field.message_type is not None:
            inner[field.number] = field.message_type
        elif field.is_repeated and field.type not in _TEXTS:
            inner[field.number] = _WIDTHS.get(field.type, 0)
    return inner


def _name(kind: Descriptor, number: int) -> str:
    field = kind.fields_by_number.get(number)
    return f"field {number}" if field is None else field.name
