"""Sealed record: one value of a prefix store, the KV of a fixed number of tokens. This module handles bytes only.

    64 bytes      for each KV head, in order
    |<- header ->|<- payload, encrypted ->|<- tag, 16 bytes ->|<- payload ... ->|

A payload is [layer, K/V, token, head dim] in the record's dtype. With int8 the scales follow, fp32 [layer, K/V, token]:
a vector is its codes times its scale. All is little-endian. Heads come first, so that a tensor-parallel rank reads,
verifies and decrypts its own heads only, whatever the number of ranks of the replica that wrote the record.

Records are sealed with AES-256-GCM. Each record has a key of its own: HMAC-SHA256(sealing secret, store key, salt),
with 128 random bits of salt in the header. Under such a key each head is sealed once, with its number as the nonce. So
no nonce occurs twice under a key unless two records have the same store key and salt, and nobody must count what the
whole fleet has ever written. Header and store key are associated data: a record that was moved to another key does not
open.
"""

from __future__ import annotations

import enum
import hmac
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .prefix_store import Buffer, ValueParts, ValueQuery

RECORD_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}  # torch's names, with the bytes of a number
HEADER_BYTES = 64
RECORD_VERSION = 1
_MAGIC = b"MOTLEYKV"
_CODES = {name: code for code, name in enumerate(RECORD_DTYPES, 1)}
_FIXED = struct.Struct("<8sHHIIIII")  # magic, version, dtype, layers, heads, head dim, tokens, and 0
_SALT_BYTES = 16
_TAG_BYTES = 16
_SCALE_BYTES = 4


class RecordFlaw(enum.StrEnum):
    """Reason why a record was not opened."""

    SIZE = "size"
    MAGIC = "magic"  # the value is not a record
    VERSION = "version"
    GEOMETRY = "geometry"  # the record is of another model or dtype
    SEAL = "seal"  # the record was changed, moved to another key, or sealed with another secret


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a record, from the reader's own model and settings; nothing of it is taken from a record that was read.

    dtype     dtype of the record's numbers
    layers    layers of the model
    heads     KV heads of the whole model, on however many ranks
    head_dim  numbers of a head's key or value of one token
    tokens    tokens of the record
    """

    dtype: str
    layers: int
    heads: int
    head_dim: int
    tokens: int

    def __post_init__(self) -> None:
        assert self.dtype in RECORD_DTYPES
        assert min(self.layers, self.heads, self.head_dim, self.tokens) > 0

    @property
    def number_bytes(self) -> int:
        """Bytes of the numbers in the payload of one KV head, without scales."""
        return 2 * self.layers * self.tokens * self.head_dim * RECORD_DTYPES[self.dtype]

    @property
    def payload_bytes(self) -> int:
        scales = 2 * self.layers * self.tokens * _SCALE_BYTES if self.dtype == "int8" else 0
        return self.number_bytes + scales

    @property
    def size(self) -> int:
        return HEADER_BYTES + self.heads * self.sealed_bytes

    @property
    def sealed_bytes(self) -> int:
        return self.payload_bytes + _TAG_BYTES

    def wanted(self, key: bytes, heads: range) -> ValueQuery:
        """Return the ranges that a rank with these KV heads reads of the value at `key`."""
        if heads == range(self.heads):
            return ValueQuery(key, self.size)
        first, last = (HEADER_BYTES + head * self.sealed_bytes for head in (heads.start, heads.stop))
        return ValueQuery(key, self.size, ((0, HEADER_BYTES), (first, last)))


class RecordSealer:
    """Encryption of records. Safe from any thread.

    Raises ImportError where the package `cryptography` is not installed.
    """

    def __init__(self, secret: bytes, geometry: Geometry) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # an engine without a store needs no package

        self.geometry = geometry
        self._secret = hmac.digest(secret, b"motley prefix records: sealing, v1", "sha256")
        self._cipher = AESGCM
        self._in_place = hasattr(AESGCM, "decrypt_into")
        shape = geometry.layers, geometry.heads, geometry.head_dim, geometry.tokens
        self._fixed = _FIXED.pack(_MAGIC, RECORD_VERSION, _CODES[geometry.dtype], *shape, 0)

    def header(self) -> bytes:
        """Return the header of a new record, with a random salt. All ranks of a model seal their heads under the same
        header.
        """
        return (self._fixed + os.urandom(_SALT_BYTES)).ljust(HEADER_BYTES, b"\0")

    def seal(self, key: bytes, header: bytes, payloads: Sequence[Buffer], first_head: int = 0) -> memoryview:
        """Encrypt the payloads of consecutive heads, from `first_head` on, for the record at `key`.

        Returns the record without its header where these are all heads.
        """
        size, cipher, bound = self.geometry.sealed_bytes, self._cipher(self._key(key, header)), header + key
        sealed = memoryview(bytearray(len(payloads) * size))
        for i, payload in enumerate(payloads):
            assert memoryview(payload).nbytes == self.geometry.payload_bytes
            target = sealed[i * size : (i + 1) * size]
            if self._in_place:
                cipher.encrypt_into(_nonce(first_head + i), payload, bound, target)
            else:
                target[:] = cipher.encrypt(_nonce(first_head + i), payload, bound)
        return sealed

    def open(self, key: bytes, found: ValueParts, into: Sequence[memoryview], first_head: int = 0) -> RecordFlaw | None:
        """Decrypt a record's heads, from `first_head` on, into one writable buffer [payload_bytes] each. Returns the
        flaw if it could not be opened; the buffers then hold nothing that may be used.

        found  what a store had for `Geometry.wanted`
        """
        from cryptography.exceptions import InvalidTag

        value = [memoryview(part).cast("B") for part in found]
        if len(value) == 1:
            value = [value[0][:HEADER_BYTES], value[0][HEADER_BYTES:]]
        if [part.nbytes for part in value] != [HEADER_BYTES, len(into) * self.geometry.sealed_bytes]:
            return RecordFlaw.SIZE
        header = bytes(value[0])
        if (flaw := self._flaw(header)) is not None:
            return flaw
        cipher, bound = self._cipher(self._key(key, header)), header + key
        try:
            for i, (target, payload) in enumerate(zip(into, self._payloads(value[1]), strict=True)):
                self._open(cipher, _nonce(first_head + i), payload, bound, target)
        except InvalidTag:
            return RecordFlaw.SEAL
        return None

    def _open(self, cipher: Any, nonce: bytes, payload: memoryview, bound: bytes, target: memoryview) -> None:
        if self._in_place:
            cipher.decrypt_into(nonce, payload, bound, target)
        else:
            target[:] = cipher.decrypt(nonce, payload, bound)

    def _payloads(self, sealed: memoryview) -> Iterator[memoryview]:
        size = self.geometry.sealed_bytes
        return (sealed[start : start + size] for start in range(0, sealed.nbytes, size))

    def _flaw(self, header: bytes) -> RecordFlaw | None:
        """Return a flaw that the header shows before decryption; the seal covers the header too."""
        magic, version, *_ = _FIXED.unpack_from(header)
        if magic != _MAGIC:
            return RecordFlaw.MAGIC
        if version != RECORD_VERSION:
            return RecordFlaw.VERSION
        return None if header.startswith(self._fixed) else RecordFlaw.GEOMETRY

    def _key(self, key: bytes, header: bytes) -> bytes:
        salt = header[_FIXED.size : _FIXED.size + _SALT_BYTES]
        return hmac.digest(self._secret, salt + key, "sha256")


def _nonce(head: int) -> bytes:
    return head.to_bytes(12, "little")
