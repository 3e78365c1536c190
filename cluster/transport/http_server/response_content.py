"""Answers of a protocol over HTTP: one JSON object, or a stream of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamingContent:
    """An answer in chunks: those of the first message, and a generator of further ones, which its user must close.

    Large chunks are serialized already.
    """

    first: list[JsonObject | EncodedObject]
    rest: AsyncGenerator[list[JsonObject | EncodedObject], None]


class EncodedObject:
    """A JSON object that is serialized already."""

    def __init__(self, content: JsonObject) -> None:
        """Serialize an object. Items of a list are serialized one by one, since one call of the encoder blocks all
        other threads.
        """
        pieces = [b"{"]
        for number, (name, value) in enumerate(content.items()):
            pieces.append(b"%s%s:" % (b"," if number else b"", encode_json(name)))
            if isinstance(value, list):
                pieces += [b"[", b",".join(encode_json(item) for item in value), b"]"]
            else:
                pieces.append(encode_json(value))
        pieces.append(b"}")
        self.body = b"".join(pieces)


def encode_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


ResponseContent = JsonObject | EncodedObject | StreamingContent
