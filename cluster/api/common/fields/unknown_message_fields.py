"""Refuses a protobuf message that has fields which this service does not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ....request_errors import unknown_field


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """Raise InvalidRequest for a field that this service does not have, at any depth."""
    for unknown in cast(Iterable[Any], UnknownFieldSet(message)):
        raise unknown_field(f"{path}field {unknown.field_number}")
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in _parts(field.message_type, value):
            refuse_unknown_fields(part, f"{path}{field.name}.")


def _parts(kind: Descriptor, value: Any) -> Iterable[Message]:
    """Return the messages in a field; for a map, its values if they are messages."""
    if not kind.GetOptions().map_entry:
        return [value] if isinstance(value, Message) else cast(Iterable[Message], value)
    holds_messages = kind.fields_by_name["value"].message_type is not None
    return cast(Iterable[Message], value.values()) if holds_messages else ()
