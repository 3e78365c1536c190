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
        """Each is computed when it is asked for: most often the first is found nowhere."""
        hashes, ids = self._hashes, self.request.prompt_ids
        for at, start in enumerate(range(0, self._length * PIECE_TOKENS, PIECE_TOKENS)):
            if at == len(hashes):
                hashes.append(hash((hashes[-1] if at else self._root(), ids[start : start + PIECE_TOKENS])))
            yield hashes[at]

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
        parent = hashes[-1] if hashes else self._root()
        for start in range(len(hashes) * PIECE_TOKENS, pieces * PIECE_TOKENS, PIECE_TOKENS):
            parent = hash((parent, ids[start : start + PIECE_TOKENS]))
            hashes.append(parent)

    def _root(self) -> int:
        return hash(root_hash(self.request.cache_salt))
