"""What a protocol over HTTP answers with: one JSON object, or a stream of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Streaming:
    """An answer in chunks: those of the first message, and the rest, to be closed by whoever holds it."""

    first: list[Object]
    rest: AsyncGenerator[list[Object], None]


Answer = Object | Streaming
