"""Access to a prefix store that an engine is given to share prefixes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .memory_store import MemoryPrefixStore
from .prefix_store import PrefixStore

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class PrefixStoreAccess:
    """Prefix store and the fleet's secret, from which keys and seals are derived.

    secret  at least SECRET_BYTES bytes that all replicas of a fleet have and nobody else

    The engine closes the store when it is closed itself.
    """

    store: PrefixStore
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.secret) >= SECRET_BYTES, "a secret that cannot be guessed"


def in_memory_access(nbytes: int) -> PrefixStoreAccess:
    """Return access to a new store in this process's memory, with a random secret that no other process has."""
    return PrefixStoreAccess(MemoryPrefixStore(nbytes), os.urandom(SECRET_BYTES))
