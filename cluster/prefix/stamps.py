"""How an owner's values are forgotten at once, by every replica, however many there are.

Before each value in Redis stands a stamp: whose it is, and the epochs in which it was made, the owner's and that of
all. A reader asks for the epochs of now in the same breath, and believes no value of another one. To forget is to set a
new epoch, in one command. Epochs are random, never counted: where Redis has lost one, every value of it is forgotten,
and none comes back. What nobody can read any more goes by its TTL, or as the least recently used.

A stamp holds for one key, and only who has the fleet's secret can make it: no fault of a memory, and nobody in Redis,
turns a value into one of another owner, key or epoch.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass

from ...replicas.prefix.store import Buffer

__all__ = ["STAMP_BYTES", "Epochs", "Names", "Stamp"]

_MAGIC = b"motley prefix v2"
_PART = 16
STAMP_BYTES = 5 * _PART  # magic, owner, epochs of all and of the owner, and a check of them and of the value's key
FOREIGN, ALTERED = "foreign", "stamp"  # what is wrong with one: it is none of ours; it was changed, or moved
_REMEMBERED = 4096  # owners


@dataclass(frozen=True, slots=True)
class Stamp:
    """owner: its tag. every, own: the epochs of all and of the owner."""

    owner: bytes
    every: bytes
    own: bytes


def new_epoch() -> bytes:
    return os.urandom(_PART)


class Names:
    """Names of Redis keys: `motley:FLEET:...`, FLEET from the secret. Nothing tells a tenant's name or a prompt."""

    def __init__(self, secret: bytes) -> None:
        self._secret = hmac.digest(secret, b"motley prefix store: names, v1", "sha256")
        self.space = b"motley:" + self._tag(b"fleet")[:8].hex().encode() + b":"
        self.every = self.space + b"epoch"

    def owner(self, owner: str) -> bytes:
        """Its tag."""
        return self._tag(b"owner " + owner.encode("utf-8", "surrogatepass"))

    def value(self, key: bytes) -> bytes:
        return self.space + b"kv:" + key.hex().encode()

    def claim(self, key: bytes) -> bytes:
        """There while a replica makes and writes that value."""
        return self.space + b"claim:" + key.hex().encode()

    def epoch(self, tag: bytes) -> bytes:
        return self.space + b"epoch:" + tag.hex().encode()

    def spent(self, tag: bytes) -> bytes:
        """Bytes that it has written lately."""
        return self.space + b"spent:" + tag.hex().encode()

    def stamped(self, key: bytes, stamp: Stamp) -> bytes:
        """What stands before the value at that key."""
        said = stamp.owner + stamp.every + stamp.own
        return _MAGIC + said + self._tag(b"stamp " + said + key)

    def stamp_of(self, key: bytes, data: Buffer) -> Stamp | str:
        """Of the value at that key; or in a word what is wrong with it."""
        data = bytes(data)
        if len(data) != STAMP_BYTES or not data.startswith(_MAGIC):
            return FOREIGN
        stamp = Stamp(*(data[i : i + _PART] for i in range(_PART, 4 * _PART, _PART)))
        return stamp if hmac.compare_digest(self.stamped(key, stamp), data) else ALTERED

    def _tag(self, text: bytes) -> bytes:
        return hmac.digest(self._secret, text, "sha256")[:_PART]


class Epochs:
    """What one replica knows of epochs, and what it has yet to tell Redis. Safe from any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Stamp] = OrderedDict()  # by tag
        self._forgetting: dict[bytes | None, None] = {}  # tags; None: all
        self._lock = threading.Lock()

    def known(self, tag: bytes) -> Stamp | None:
        return self._known.get(tag)

    def learn(self, stamp: Stamp) -> None:
        """Those of now. Not while they are being forgotten: they are the old ones until Redis knows."""
        with self._lock:
            if self.forgets(stamp.owner):
                return
            self._known[stamp.owner] = stamp
            self._known.move_to_end(stamp.owner)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def forget(self, tag: bytes | None) -> None:
        """Until Redis knows of it nothing of that owner's is read or written here."""
        with self._lock:
            self._forgetting[tag] = None
            if tag is None:
                self._known.clear()
            self._known.pop(tag or b"", None)

    def to_forget(self) -> list[bytes | None]:
        with self._lock:
            return list(self._forgetting)

    def forgotten(self, tag: bytes | None) -> None:
        """Redis has the new epoch."""
        with self._lock:
            self._forgetting.pop(tag, None)

    def forgets(self, tag: bytes) -> bool:
        return bool(self._forgetting) and (tag in self._forgetting or None in self._forgetting)
