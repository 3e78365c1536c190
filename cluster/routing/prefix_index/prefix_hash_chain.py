"""Hash chain over the pieces of a prompt, computed only as far as it is read, for use within this process.

Replicas identify the KV blocks of a prompt by a keyed hash that nobody can forge. This chain only records where a
prefix has been sent, so Python's own hash is enough. It starts from a hash of bytes, which differs between processes
and between cache groups.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import overload

from ....replicas.kv.blocks import root_hash
from ....replicas.types import BLOCK_TOKENS, Request

__all__ = ["MAX_PROMPT_PIECES", "PIECE_TOKENS", "PrefixHashChain"]

PIECE_TOKENS = 4 * BLOCK_TOKENS  # smaller pieces would not change a choice, and would cost as much each
MAX_PROMPT_PIECES = 64  # maximum pieces of one prompt: tokens behind these are seldom shared
BEGINNING_BLOCKS = 8  # blocks at the beginning of a prompt by which all ingresses know it


class PrefixHashChain(Sequence[int]):
    """Sequence of chained hashes of the pieces of one request's prompt that a replica may have cached.

    The last token is never part of it, since a replica has to compute at least one token.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._length = min((len(request.prompt_ids) - 1) // PIECE_TOKENS, MAX_PROMPT_PIECES)
        self._hashes: list[int] = []

    def beginning(self) -> bytes:
        """Return a digest of the prompt's first blocks, equal in all ingresses; empty bytes if it fills no block."""
        ids = self.request.prompt_ids
        blocks = min(len(ids) // BLOCK_TOKENS, BEGINNING_BLOCKS)
        tokens = array("q", ids[: blocks * BLOCK_TOKENS]).tobytes()
        return blake2b(root_hash(self.request.cache_salt) + tokens, digest_size=8).digest() if blocks else b""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Yield the hashes, computing each only when it is reached: most often even the first is found nowhere."""
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
