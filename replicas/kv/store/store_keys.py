"""Store keys of the KV of a prefix, and the number of tokens that a value covers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...types import BLOCK_TOKENS
from .sealed_record import RECORD_VERSION, Geometry

_TARGET_VALUE_BYTES = 2**20  # least bytes of a value, unless it would need more than _MAX_VALUE_TOKENS
_MAX_VALUE_TOKENS = 128


def with_value_tokens(geometry: Geometry) -> Geometry:
    """Return the geometry with as many tokens per stored value as make about 1 MiB: one block to 128 tokens.

    It is the fewest tokens that make 1 MiB, so that a value has 1 to 2 MiB: a store moves such values at its full rate,
    and a prefix loses little at its end. Small models stop at 128 tokens, since a coarser step would miss most of their
    prompts; their values are smaller. With more than 64 KiB a token a value is one block, however large it is.
    """
    tokens = BLOCK_TOKENS
    while tokens < _MAX_VALUE_TOKENS and replace(geometry, tokens=tokens).size < _TARGET_VALUE_BYTES:
        tokens *= 2
    return replace(geometry, tokens=tokens)


def kv_identity(model: str, geometry: Geometry, kv_dtype: str, numerics: str | None) -> bytes:
    """Return 32 bytes that are equal for engines which may share KV.

    model     digest of the configuration, with rope, and of every weight's content
    geometry  shape of records, with their dtype
    kv_dtype  dtype of the KV that records are made of; between numerics classes all that is rounded to the record's
              dtype may be shared, and this is the record's
    numerics  numerics class; None to share KV with other classes as well. It then differs in its last digits from what
              this replica would have computed, and so may the tokens that follow
    """
    hashed = hashlib.sha256(b"motley prefix records")
    for part in (str(RECORD_VERSION), model, repr(geometry), kv_dtype, "any" if numerics is None else f"of {numerics}"):
        hashed.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return hashed.digest()


@dataclass(frozen=True, slots=True)
class StoreValue:
    """Value of the store.

    key     store key
    hashes  hashes of the KV blocks that it covers; the last one depends on all tokens before it too
    """

    key: bytes
    hashes: tuple[bytes, ...]


class StoreKeys:
    """Store keys for one identity: HMAC-SHA256 under the fleet's secret, so that a key does not help to guess the
    prompt.
    """

    def __init__(self, secret: bytes, identity: bytes) -> None:
        self._secret = hmac.digest(secret, b"motley prefix records: keys, v1", "sha256")
        self._identity = identity

    def renew(self, identity: bytes) -> None:
        """Set another identity of the KV, which all keys from now on depend on."""
        self._identity = identity

    @property
    def name(self) -> str:
        """16 hex digits that are equal for engines which read each other's values, and that reveal nothing else."""
        return self._key(b"")[:8].hex()

    def values(self, hashes: Sequence[bytes], size: int) -> tuple[StoreValue, ...]:
        """Return the values, of `size` blocks each, that a prefix with these block hashes fills."""
        chunks = (tuple(hashes[end - size : end]) for end in range(size, len(hashes) + 1, size))
        return tuple(StoreValue(self._key(chunk[-1]), chunk) for chunk in chunks)

    def _key(self, block_hash: bytes) -> bytes:
        """Return the store key of a block hash, 32 bytes."""
        return hmac.digest(self._secret, self._identity + block_hash, "sha256")
