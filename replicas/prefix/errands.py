"""What an engine sends a courier for, as plain data: it is filled in on the way and comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["HIT", "MISS", "RANGE", "SLOW", "Ask", "Courier", "Errand", "Fetch", "Forget", "Release", "Save"]

HIT, MISS, SLOW = "hit", "miss", "timeout"  # how a fetch ends, beside the flaws of records
RANGE = "range"  # so does one whose record has a number too large for this replica's KV


class Mark(Protocol):
    """A place in the order of copies between device and host."""

    def wait(self) -> None: ...


@dataclass(eq=False, slots=True, kw_only=True)
class Fetch:
    """Values of a prefix, one after the other, into blocks of the host.

    keys, blocks  of each value: the blocks are the courier's until the errand is back
    value_s       what it would take to compute one value's tokens, in seconds
    sent          monotonic: the first read's time counts from then, wherever the errand waits
    expires       monotonic: after that nobody waits for it. The courier puts it off, as values come
    cancelled     nobody waits for it any more

    count         leading values that have come
    outcome       of the first that did not: HIT if there is none
    seconds       it took
    """

    keys: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]
    value_s: float
    sent: float
    expires: float
    cancelled: bool = False
    count: int = 0
    outcome: str = MISS
    seconds: float = 0.0


@dataclass(eq=False, slots=True, kw_only=True)
class Save:
    """One value, from blocks of the host, once the copies up to `mark` have been made.

    anew  what the store has of it is of no use
    unfit  it was not written, as a number is not finite in the record's dtype
    """

    key: bytes
    blocks: tuple[int, ...]
    owner: str
    anew: bool = False
    mark: Mark | None = None
    saved: bool = False
    unfit: bool = False


@dataclass(eq=False, slots=True, kw_only=True)
class Release:
    """Blocks of the host that are free as soon as the copies up to `mark` have been made."""

    blocks: tuple[int, ...]
    mark: Mark


@dataclass(eq=False, slots=True, kw_only=True)
class Ask:
    """How many of the leading keys have a value that can be read; None: that could not be told.

    owner  of what is stored then
    """

    keys: tuple[bytes, ...]
    owner: str
    known: int | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class Forget:
    """All values of that owner; None: of everyone."""

    owner: str | None


Errand = Fetch | Save | Release | Ask | Forget


class Courier(Protocol):
    """Runs errands beside the engine. Every one that is sent comes back, however late, until `close`."""

    @property
    def away(self) -> bool:
        """The store has failed of late: to fetch is in vain."""
        ...

    def send(self, errand: Errand) -> None: ...

    def take(self) -> list[Errand]:
        """Those that have come back since it was last asked."""
        ...

    def wait(self, seconds: float) -> None:
        """Until there is something to take, for so long at most."""
        ...

    def close(self) -> None: ...
