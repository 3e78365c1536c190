"""Answers of a protocol over HTTP: one JSON object, or a stream of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Streaming:
    """An answer in chunks: those of the first message, and a generator of further ones, which its user must close.

    Large chunks are serialized already.
    """

    first: list[Object | Written]
    rest: AsyncGenerator[list[Object | Written], None]


class Written:
    """A JSON object that is serialized already."""

    def __init__(self, content: Object) -> None:
        """Serialize an object. Items of a list are serialized one by one, since one call of the encoder blocks all
        other threads.
        """
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
