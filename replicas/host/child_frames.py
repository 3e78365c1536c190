"""Frames between an engine and the processes that match grammars: plain bytes over a Unix socket."""

from __future__ import annotations

import array
import enum
import json
import struct
from collections.abc import Sequence
from typing import Any, Protocol

HEADER = struct.Struct("<BII")  # kind, sequence, bytes that follow


class GrammarCommand(enum.IntEnum):
    """Kinds of frames from the engine to a process."""

    VOCABULARY = 1  # to the forkserver: sizes, ids that end a sequence, the bytes of every token
    COMPILE = 2  # JSON: kind, source and `cpu_s`, the CPU seconds it may take
    OPEN = 3  # begin a sequence, with the tokens it has already
    ACCEPT = 4  # a sequence's next token
    CLOSE = 5


class GrammarReply(enum.IntEnum):
    """Kinds of frames from a process to the engine. MASK, DONE or DEAD_END answers OPEN and ACCEPT."""

    READY = 1  # the vocabulary is in, or the grammar is compiled
    REFUSED = 2  # the grammar is refused: the reason as text
    MASK = 3  # a bit for each token id, least significant first
    DONE = 4  # nothing can follow
    DEAD_END = 5  # a token does not follow the grammar, or none can and it is not complete
    FORKED = 6  # from the forkserver, before anything else: the process's number, in the place of the sequence


class Source(Protocol):
    """A blocking socket, or what receives as one does."""

    def recv(self, size: int, /) -> bytes: ...


def encode_frame(what: int, sequence: int = 0, payload: bytes = b"") -> bytes:
    return HEADER.pack(what, sequence, len(payload)) + payload


def receive_frame(source: Source) -> tuple[int, int, bytes] | None:
    """Return the source's next frame as (kind, sequence, payload); None at its end."""
    header = _exactly(source, HEADER.size)
    if header is None:
        return None
    what, sequence, size = HEADER.unpack(header)
    payload = _exactly(source, size)
    return None if payload is None else (what, sequence, payload)


def _exactly(source: Source, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = source.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def encode_ids(token_ids: Sequence[int]) -> bytes:
    return array.array("I", token_ids).tobytes()


def decode_ids(payload: bytes) -> list[int]:
    values = array.array("I")
    values.frombytes(payload)
    return values.tolist()


def encode_vocabulary(tokens: Sequence[bytes], vocab_size: int, stop_ids: Sequence[int]) -> bytes:
    """Return the vocabulary's payload. `tokens`: the bytes of each id, empty for those that are not text."""
    head = {"vocab_size": vocab_size, "stop_ids": list(stop_ids), "lengths": [len(token) for token in tokens]}
    return json.dumps(head).encode() + b"\n" + b"".join(tokens)


def decode_vocabulary(payload: bytes) -> tuple[list[bytes], int, list[int]]:
    head, _, blob = payload.partition(b"\n")
    fields: dict[str, Any] = json.loads(head)
    tokens, at = [], 0
    for length in fields["lengths"]:
        tokens.append(blob[at : at + length])
        at += length
    return tokens, fields["vocab_size"], fields["stop_ids"]
