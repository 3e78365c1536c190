"""Interface of a prefix store to a replica: sealed records by key. Nothing here depends on what is in a record."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...host.metric_fields import counter, gauge

Buffer = bytes | bytearray | memoryview  # contiguous, with items of one byte

ValueParts = tuple[Buffer, ...]  # the bytes of each wanted range, in their order


class BreakerState(enum.StrEnum):
    """State of a store's circuit breaker: whether the store is called at all."""

    CLOSED = "closed"  # the store is called
    OPEN = "open"  # the store has failed recently: everything is a miss at once
    HALF_OPEN = "half-open"  # the next call shows whether the store works again


@dataclass(frozen=True, slots=True)
class ValueQuery:
    """Part of one value that is to be read.

    key     store key: bytes that reveal nothing of the prompt
    size    bytes of the whole value, by the reader's own configuration; a value of another size is a miss
    ranges  half-open, ascending and disjoint ranges that this rank reads, such as the header and some of the heads;
            None for the whole value as one range
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


_BREAKER_GAUGE = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Statistics of a store since it was made. All numbers only grow, except the last ones from `breaker` on.

    hits             values that `get` was asked for and returned
    misses           values that it did not return, including those that failed or were never requested from the server
    stored           values that were written
    errors           number of failed reads and writes by reason: "timeout", "connection", "size", ...
    dropped          number of values that were not written, by reason: "queue_full", "breaker_open", "quota", ...;
                     "elsewhere" if another replica has written or is writing them; "range", which the engine adds, if a
                     number was not finite in the record's dtype
    bytes_read       bytes read
    bytes_written    bytes written
    reads, read_s    calls of `get` that asked for something, and the seconds that they took together
    writes, write_s  the same for writes
    breaker          current state of the circuit breaker
    queued           values that currently wait to be written
    values, nbytes   values currently held and their bytes, where the store knows
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    errors: Mapping[str, int] = field(
        default_factory=dict,
        metadata=counter(
            "external_prefix_cache_errors",
            "Prefix store calls that failed, and values that could not be used, by reason",
            labels=("reason",),
        ),
    )
    dropped: Mapping[str, int] = field(
        default_factory=dict,
        metadata=counter(
            "external_prefix_cache_dropped",
            "Values that were not written to the prefix store, by reason",
            labels=("reason",),
        ),
    )
    bytes_read: int = field(
        default=0, metadata=counter("external_prefix_cache_read_bytes", "Bytes read from the prefix store")
    )
    bytes_written: int = field(
        default=0, metadata=counter("external_prefix_cache_written_bytes", "Bytes written to the prefix store")
    )
    reads: int = field(
        default=0, metadata=counter("external_prefix_cache_reads", "Calls that read from the prefix store")
    )
    read_s: float = field(
        default=0.0,
        metadata=counter(
            "external_prefix_cache_read_seconds",
            "Seconds that calls which read from the prefix store took, in total",
        ),
    )
    writes: int = field(
        default=0, metadata=counter("external_prefix_cache_writes", "Calls that wrote to the prefix store")
    )
    write_s: float = field(
        default=0.0,
        metadata=counter(
            "external_prefix_cache_write_seconds",
            "Seconds that calls which wrote to the prefix store took, in total",
        ),
    )
    breaker: BreakerState = field(
        default=BreakerState.CLOSED,
        metadata=gauge(
            "external_prefix_cache_breaker",
            "Prefix store: 0 used, 1 left alone after failures, 0.5 tried again with one call",
            lambda stats: _BREAKER_GAUGE[stats.breaker],
        ),
    )
    queued: int = field(
        default=0,
        metadata=gauge("external_prefix_cache_queued", "Values that wait to be written to the prefix store"),
    )
    values: int | None = None
    nbytes: int | None = None


class PrefixStore(Protocol):
    """Protocol of a store of sealed records by key, outside of the replica. Several threads use it at a time; calls
    block.

    No method raises: whatever fails is a miss, and is counted. A store may lose any value at any time, and may return
    wrong bytes: a reader opens each record, and uses nothing that it has not verified.
    """

    def get(
        self, wanted: Sequence[ValueQuery], deadline: float, buffer: memoryview | None = None
    ) -> Sequence[ValueParts | None]:
        """Return the leading values that the store has, and None for each of the others, as many as were wanted.

        deadline  in seconds of `time.monotonic`; after it everything not yet read is a miss, and no call lasts
                  noticeably longer
        buffer    writable buffer where values may be read into. A store that does not need it, or finds it too small,
                  uses other memory. A reused buffer is faster: new memory costs more to touch first than to write to

        Values are parts of one prefix, in its order: after the first None the others may be None although they exist.
        The returned buffers belong to the caller and stay unchanged; those in `buffer`, until the caller passes it
        again.
        """
        ...

    @property
    def away(self) -> bool:
        """Whether the store has failed recently: until it works again every value is a miss and nothing is stored, at
        once.
        """
        ...

    def count_stored(self, wanted: Sequence[ValueQuery], owner: str, deadline: float) -> int | None:
        """Return how many leading values `get` would return, as far as that is known without reading them; None if it
        is not.

        This is an estimate: a value may be gone by the time it is read, and only its reader finds out what is in it.

        owner  owner of the missing values, if they are stored later
        """
        ...

    def claim(self, wanted: ValueQuery, deadline: float, *, anew: bool = False) -> bool:
        """Return whether to `put` a value, before it is made; False if the store has it, or another replica is writing
        it.

        Returns True as well where that is not known, since writing a value twice does no harm. A caller that claims a
        value and does not put it keeps others from writing it for a few seconds.

        anew  the store's value is useless and must be replaced
        """
        ...

    def put(self, key: bytes, parts: Sequence[Buffer], owner: str) -> bool:
        """Queue the parts, one after the other, to be stored as one value, without waiting for that.

        parts  must not change any more; the store keeps them until they are written
        owner  whose quota the value counts against, and who may delete it: a tenant, or a group that shares its
               prefixes

        Returns False where the value was dropped at once, because the queue is full, the breaker open or the owner over
        its quota.
        """
        ...

    def forget(self, owner: str | None) -> None:
        """Delete all values of an owner from the store; None for those of all owners."""
        ...

    def stats(self) -> StoreStats: ...

    def flush(self, deadline: float) -> None:
        """Wait until all queued values are written or dropped, at most until the deadline in seconds of
        `time.monotonic`.
        """
        ...

    def close(self) -> None:
        """Write nothing more, and release threads and connections. Later reads are misses."""
        ...
