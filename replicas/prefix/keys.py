"""Where the KV of a prefix is: how many tokens a value covers, and its key in the store."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..protocol import BLOCK_TOKENS
from .record import VERSION, Geometry

__all__ = ["StoreKeys", "Value", "identity", "with_tokens"]

_WANTED_BYTES = 2**20  # of a value, at least, where that takes no more than so many tokens
_MOST_TOKENS = 128


def with_tokens(geometry: Geometry) -> Geometry:
    """The geometry with as many tokens as a value shall cover: a power of two, one block at least.

    The fewest that make 1 MiB, so that a value has 1 to 2 MiB: a store moves those at its full rate, and a prefix
    loses little at its end. Small models stop at 128 tokens, as a coarser step would miss most of their prompts; their
    values are smaller. Of models with more than 64 KiB a token a value is a block, as large as it is.
    """
    tokens = BLOCK_TOKENS
    while tokens < _MOST_TOKENS and replace(geometry, tokens=tokens).size < _WANTED_BYTES:
        tokens *= 2
    return replace(geometry, tokens=tokens)


def identity(model: str, geometry: Geometry, kv_dtype: str, numerics: str | None) -> bytes:
    """What may share KV, as 32 bytes.

    model     digest of the configuration, rope and all, and of every weight's content
    geometry  of records: their dtype too
    kv_dtype  of the KV that records are made of; between classes whatever is rounded to the record's counts, and this
              is the record's
    numerics  the class; None: KV of other classes counts as well. It differs then in its last digits from what this
              replica would have computed, and so may the tokens that follow
    """
    hashed = hashlib.sha256(b"motley prefix records")
    for part in (str(VERSION), model, repr(geometry), kv_dtype, "any" if numerics is None else f"of {numerics}"):
        hashed.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return hashed.digest()


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the store. hashes: of the KV blocks that it covers; the last one stands for all before it too."""

    key: bytes
    hashes: tuple[bytes, ...]


class StoreKeys:
    """Keys of one identity: HMAC-SHA256 under the fleet's secret, so that who sees a key cannot guess the prompt."""

    def __init__(self, secret: bytes, identity: bytes) -> None:
        self._secret = hmac.digest(secret, b"motley prefix records: keys, v1", "sha256")
        self._identity = identity

    def renew(self, identity: bytes) -> None:
        """From now on of another one."""
        self._identity = identity

    @property
    def name(self) -> str:
        """The same for those who read each other's values, and only for them: 16 hex digits that say nothing else."""
        return self._key(b"")[:8].hex()

    def values(self, hashes: Sequence[bytes], size: int) -> tuple[Value, ...]:
        """Those of `size` blocks each that a prefix with these block hashes fills."""
        chunks = (tuple(hashes[end - size : end]) for end in range(size, len(hashes) + 1, size))
        return tuple(Value(self._key(chunk[-1]), chunk) for chunk in chunks)

    def _key(self, block_hash: bytes) -> bytes:
        """32 bytes."""
        return hmac.digest(self._secret, self._identity + block_hash, "sha256")
