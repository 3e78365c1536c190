"""What a replica asks of a prefix store: sealed records by key. Nothing here knows what is in a record."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Breaker", "Buffer", "Found", "PrefixStore", "StoreStats", "Wanted"]

Buffer = bytes | bytearray | memoryview  # of single bytes, contiguous

Found = tuple[Buffer, ...]  # one for each range that was wanted, in their order, each of just its length


class Breaker(enum.StrEnum):
    """Whether a store is asked at all."""

    CLOSED = "closed"  # it is
    OPEN = "open"  # it has failed of late: everything is a miss, at once
    HALF_OPEN = "half-open"  # the next call shows whether it is well again


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read of one value.

    key     of the store: bytes that say nothing of the prompt
    size    bytes of the whole value, as the reader's own configuration has it; one of another size is a miss
    ranges  half-open, ascending and apart: what this rank reads of it, such as its header and some of its heads.
            None: all of it, as one range
    """

    key: bytes
    size: int
    ranges: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        assert self.size > 0
        ends = [0, *(edge for start, end in self.spans for edge in (start, end)), self.size]
        assert ends == sorted(ends), "ranges lie within the value, one after the other"
        assert all(start < end for start, end in self.spans), "no range is empty"

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return ((0, self.size),) if self.ranges is None else self.ranges

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store has done since it was made; every number but those of the last lines only grows.

    hits, misses       values that `get` was asked for. What failed is a miss, and what nobody asked the server for too
    stored             values that were written
    errors             reason -> calls that failed, reads and writes: "timeout", "connection", "size", ...
    dropped            reason -> values that were not written: "queue_full", "breaker_open", "quota", ...; "elsewhere":
                       another replica has written them, or does; "range" is told by the engine: a number was not
                       finite in the record's dtype
    bytes_read, bytes_written
    reads, read_s      calls of `get` that asked for something, and the seconds they took together
    writes, write_s    likewise of writes
    breaker            now
    queued             values that wait to be written now
    values, nbytes     held now, where the store knows
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    reads: int = 0
    read_s: float = 0.0
    writes: int = 0
    write_s: float = 0.0
    breaker: Breaker = Breaker.CLOSED
    queued: int = 0
    values: int | None = None
    nbytes: int | None = None


class PrefixStore(Protocol):
    """Sealed records by key, outside of the replica. Used from several threads at a time; its calls block.

    No method raises: whatever fails is a miss, and counted. A store may lose any value at any time, and may be wrong:
    who reads a record opens it, and believes nothing that it has not verified.
    """

    def get(self, wanted: Sequence[Wanted], deadline: float, room: memoryview | None = None) -> Sequence[Found | None]:
        """The leading values that are there, and None for each of the others, as many as were wanted.

        deadline  in seconds of `time.monotonic`; after it everything not yet read is a miss, and no call lasts
                  noticeably longer
        room      where what is read may be put, writable. A store that has no use for it, or finds it too small, takes
                  other memory: that of the process is new each time, and pages that are touched first cost more than
                  what is written to them

        Values are parts of one prefix, in its order: after the first None the others may be None although they are
        there. The buffers are the caller's, and stay as they are; in `room`, until it gives that again.
        """
        ...

    @property
    def away(self) -> bool:
        """It has failed of late: until it is well again every value is a miss, and nothing is stored. At once told."""
        ...

    def known(self, wanted: Sequence[Wanted], owner: str, deadline: float) -> int | None:
        """How many leading values `get` would give, by all that can be told without reading them. None: nobody said.

        At a guess: one may be gone by the time it is read, and what is in it only its reader sees.

        owner  who puts those that are missing, if anybody does
        """
        ...

    def claim(self, wanted: Wanted, deadline: float, *, anew: bool = False) -> bool:
        """Whether to `put` that value, asked before it is made: False: it is there, or another replica is at it.

        anew  it is there and of no use. True as well where nobody said: to write twice harms nobody. Who has claimed
              a value and does not put it keeps others from it for a few seconds.
        """
        ...

    def put(self, key: bytes, parts: Sequence[Buffer], owner: str) -> bool:
        """Store the parts, one after the other, as one value: queued, and not waited for.

        parts  must not change any more; the store keeps them until they are written
        owner  whose quota it counts against, and who may forget it: a tenant, or a group that shares its prefixes

        False: it was dropped at once, as the queue is full, the breaker open or the owner over its quota.
        """
        ...

    def forget(self, owner: str | None) -> None:
        """Let go of all values of that owner; None: of everyone."""
        ...

    def stats(self) -> StoreStats: ...

    def flush(self, deadline: float) -> None:
        """Wait until all that was put is written or dropped, and no longer than until then (`time.monotonic`)."""
        ...

    def close(self) -> None:
        """Write nothing more and let go of threads and connections. What is asked afterwards is a miss."""
        ...
