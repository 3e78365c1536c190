"""What an engine is given to share prefixes through a store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .memory import HostStore
from .store import PrefixStore

__all__ = ["SECRET_BYTES", "PrefixAccess", "memory_access"]

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class PrefixAccess:
    """secret: at least SECRET_BYTES that all replicas of a fleet have, and nobody else: keys and seals come of it.

    The engine closes the store when it is closed itself.
    """

    store: PrefixStore
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.secret) >= SECRET_BYTES, "a secret that cannot be guessed"


def memory_access(nbytes: int) -> PrefixAccess:
    """A store in this process's memory, with a secret that nobody else has."""
    return PrefixAccess(HostStore(nbytes), os.urandom(SECRET_BYTES))
