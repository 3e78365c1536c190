"""Stamps and epochs, by which every replica forgets all of an owner's values at once.

Each value in Redis is preceded by a stamp: its owner, and the epochs in which it was written, the owner's and the one
of all. A reader asks for the current epochs in the same step, and ignores values of other epochs. Forgetting means to
set a new epoch, in one command. Epochs are random and never counted: if Redis loses one, all values of it are
forgotten, and none returns. Values that nobody can read any more expire by their TTL, or are evicted as the least
recently used.

A stamp is valid for one key, and only who has the fleet's secret can make it. So neither a memory fault nor anyone with
access to Redis can turn a value into one of another owner, key or epoch.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass

from ...replicas.kv.store.prefix_store import Buffer

_MAGIC = b"motley prefix v2"
_PART = 16
STAMP_BYTES = 5 * _PART  # magic, owner, epochs of all and of the owner, and a MAC over these and the value's key
FOREIGN, ALTERED = "foreign", "stamp"  # faults of a stamp: not one of ours; changed or moved to another key
_REMEMBERED = 4096  # maximum number of owners whose epochs are remembered


@dataclass(frozen=True, slots=True)
class ValueStamp:
    """Stamp of a value.

    owner  tag of its owner
    every  epoch of all when it was written
    own    epoch of the owner when it was written
    """

    owner: bytes
    every: bytes
    own: bytes


def new_epoch() -> bytes:
    return os.urandom(_PART)


class RedisKeyNames:
    """Names of Redis keys: `motley:FLEET:...`, where FLEET is derived from the secret.

    No name reveals the name of a tenant or a prompt.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = hmac.digest(secret, b"motley prefix store: names, v1", "sha256")
        self.space = b"motley:" + self._tag(b"fleet")[:8].hex().encode() + b":"
        self.every = self.space + b"epoch"

    def owner(self, owner: str) -> bytes:
        """Return the tag of an owner."""
        return self._tag(b"owner " + owner.encode("utf-8", "surrogatepass"))

    def value(self, key: bytes) -> bytes:
        return self.space + b"kv:" + key.hex().encode()

    def claim(self, key: bytes) -> bytes:
        """Return the name of a value's claim, which exists while a replica computes and writes the value."""
        return self.space + b"claim:" + key.hex().encode()

    def epoch(self, tag: bytes) -> bytes:
        return self.space + b"epoch:" + tag.hex().encode()

    def spent(self, tag: bytes) -> bytes:
        """Return the name of the counter of bytes that an owner has written recently."""
        return self.space + b"spent:" + tag.hex().encode()

    def stamped(self, key: bytes, stamp: ValueStamp) -> bytes:
        """Return the encoded stamp that precedes the value at that key."""
        said = stamp.owner + stamp.every + stamp.own
        return _MAGIC + said + self._tag(b"stamp " + said + key)

    def stamp_of(self, key: bytes, data: Buffer) -> ValueStamp | str:
        """Decode the stamp of the value at that key; return `FOREIGN` or `ALTERED` if it is invalid."""
        data = bytes(data)
        if len(data) != STAMP_BYTES or not data.startswith(_MAGIC):
            return FOREIGN
        stamp = ValueStamp(*(data[i : i + _PART] for i in range(_PART, 4 * _PART, _PART)))
        return stamp if hmac.compare_digest(self.stamped(key, stamp), data) else ALTERED

    def _tag(self, text: bytes) -> bytes:
        return hmac.digest(self._secret, text, "sha256")[:_PART]


class EpochCache:
    """Epochs that one replica knows, and forgetting that it has yet to tell Redis. Safe from any thread."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[bytes, ValueStamp] = OrderedDict()  # by tag
        self._forgetting: dict[bytes | None, None] = {}  # tags; None: all
        self._lock = threading.Lock()

    def cached(self, tag: bytes) -> ValueStamp | None:
        return self._by_owner.get(tag)

    def learn(self, stamp: ValueStamp) -> None:
        """Record an owner's current epochs, unless its values are being forgotten: then Redis still has old ones."""
        with self._lock:
            if self.forgets(stamp.owner):
                return
            self._by_owner[stamp.owner] = stamp
            self._by_owner.move_to_end(stamp.owner)
            if len(self._by_owner) > _REMEMBERED:
                self._by_owner.popitem(last=False)

    def forget(self, tag: bytes | None) -> None:
        """Forget an owner's values, or all (None): until Redis knows, this replica neither reads nor writes any."""
        with self._lock:
            self._forgetting[tag] = None
            if tag is None:
                self._by_owner.clear()
            self._by_owner.pop(tag or b"", None)

    def pending_forgets(self) -> list[bytes | None]:
        with self._lock:
            return list(self._forgetting)

    def forgotten(self, tag: bytes | None) -> None:
        """Record that Redis has the new epoch."""
        with self._lock:
            self._forgetting.pop(tag, None)

    def forgets(self, tag: bytes) -> bool:
        return bool(self._forgetting) and (tag in self._forgetting or None in self._forgetting)
