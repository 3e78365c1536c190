"""Operations on a prefix store, as plain data that an engine sends, and that comes back with the result filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

HIT, MISS, TIMEOUT = "hit", "miss", "timeout"  # outcomes of a fetch, besides the flaws of records
OUT_OF_RANGE = "range"  # outcome of a fetch whose record has a number too large for this replica's KV


class CopyEvent(Protocol):
    """Point in the order of copies between device and host, which can be waited for."""

    def wait(self) -> None: ...


@dataclass(eq=False, slots=True, kw_only=True)
class FetchOp:
    """Operation that reads the values of a prefix, one after the other, into blocks of the host.

    keys       store key of each value
    blocks     blocks for each value; only the store's threads may use them until the operation is back
    value_s    seconds that computing one value's tokens would take
    sent       monotonic seconds from which the first read's deadline counts, however long the operation is queued
    expires    monotonic seconds after which the engine stops waiting; put off as values come
    cancelled  whether the engine has stopped waiting

    count    number of leading values that have come
    outcome  why the first missing value is missing; HIT if none is
    seconds  seconds that the operation took
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
class SaveOp:
    """Operation that writes one value from blocks of the host, once the copies up to `mark` have ended.

    anew   whether the value that the store has is useless and must be replaced
    saved  whether it was given to the store
    unfit  whether it was not written because a number is not finite in the record's dtype
    """

    key: bytes
    blocks: tuple[int, ...]
    owner: str
    anew: bool = False
    mark: CopyEvent | None = None
    saved: bool = False
    unfit: bool = False


@dataclass(eq=False, slots=True, kw_only=True)
class ReleaseOp:
    """Operation that frees blocks of the host once the copies up to `mark` have ended."""

    blocks: tuple[int, ...]
    mark: CopyEvent


@dataclass(eq=False, slots=True, kw_only=True)
class LookupOp:
    """Operation that asks the store how long the run of keys is, from the first one on, whose values can all be read.

    owner       owner that the values of the other keys are stored for, if they are computed after this
    num_stored  number of keys in that run, set when the operation comes back; None if the store did not answer
    """

    keys: tuple[bytes, ...]
    owner: str
    num_stored: int | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class ForgetOp:
    """Operation that deletes all values of an owner; None for those of all owners."""

    owner: str | None


StoreOp = FetchOp | SaveOp | ReleaseOp | LookupOp | ForgetOp


class StoreWorker(Protocol):
    """Protocol of threads that do operations beside the engine. Each operation comes back, however late, until
    `close`.
    """

    @property
    def away(self) -> bool:
        """Whether the store has failed recently, so that fetches would be in vain."""
        ...

    def send(self, store_op: StoreOp) -> None: ...

    def take(self) -> list[StoreOp]:
        """Return the operations on the store that have ended since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until an operation on the store has ended, for at most so many seconds."""
        ...

    def close(self) -> None: ...
