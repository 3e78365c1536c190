"""What a protocol over HTTP answers with: one JSON object, or a stream of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Streaming:
    """An answer in chunks: those of the first message, and the rest, to be closed by whoever holds it.

    Large ones are written already.
    """

    first: list[Object | Written]
    rest: AsyncGenerator[list[Object | Written], None]


class Written:
    """One object, written already."""

    def __init__(self, content: Object) -> None:
        """The items of a list are written one by one: the writer lets nobody else run meanwhile."""
        pieces = [b"{"]
        for number, (name, value) in enumerate(content.items()):
            pieces.append(b"%s%s:" % (b"," if number else b"", dump(name)))
            if isinstance(value, list):
                pieces += [b"[", b",".join(dump(item) for item in value), b"]"]
            else:
                pieces.append(dump(value))
        pieces.append(b"}")
        self.body = b"".join(pieces)


def dump(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


Answer = Object | Written | Streaming
