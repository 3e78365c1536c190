"""What a prompt begins with, piece by piece, computed no further than somebody looks: for this process alone.

Replicas know a prompt's blocks by a keyed hash that nobody can forge. Here it only says where a beginning has been
sent: Python's own hash does, begun with one of bytes, which is another in each process and for each cache group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from ...replicas.blocks import root_hash
from ...replicas.protocol import BLOCK_TOKENS, Request

__all__ = ["MOST_PIECES", "PIECE_TOKENS", "Chain"]

PIECE_TOKENS = 4 * BLOCK_TOKENS  # finer than that decides nothing, and costs as much a piece
MOST_PIECES = 64  # of one prompt: what lies deeper is seldom shared


class Chain(Sequence[int]):
    """Of one request's prompt: the pieces that a replica may find, which never are all of its tokens."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._length = min((len(request.prompt_ids) - 1) // PIECE_TOKENS, MOST_PIECES)
        self._hashes: list[int] = []

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        yield from self._hashes
        for at in range(len(self._hashes), self._length):
            self._extend(at + 1)
            yield self._hashes[at]

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            self._extend(self._length)
            return self._hashes[at]
        if not 0 <= at < self._length:
            raise IndexError(at)
        self._extend(at + 1)
        return self._hashes[at]

    def _extend(self, pieces: int) -> None:
        hashes, ids = self._hashes, self.request.prompt_ids
        for start in range(len(hashes) * PIECE_TOKENS, pieces * PIECE_TOKENS, PIECE_TOKENS):
            parent = hashes[-1] if hashes else hash(root_hash(self.request.cache_salt))
            hashes.append(hash((parent, ids[start : start + PIECE_TOKENS])))
