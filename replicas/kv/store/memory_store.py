"""Prefix store in one process's memory, which evicts the least recently used values."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from .prefix_store import Buffer, StoreStats, ValueParts, ValueQuery


@dataclass(frozen=True, slots=True)
class _MemoryValue:
    data: bytes
    owner: str


class MemoryPrefixStore:
    """Prefix store in this process's memory. Implements `PrefixStore`.

    capacity  most bytes of values
    clock     seconds, as deadlines have them
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._clock = clock
        self._values: OrderedDict[bytes, _MemoryValue] = OrderedDict()  # least recently used first
        self._nbytes = 0
        self._stats = StoreStats()
        self._closed = False
        self._lock = threading.Lock()

    def get(
        self, wanted: Sequence[ValueQuery], deadline: float, buffer: memoryview | None = None
    ) -> Sequence[ValueParts | None]:
        began = self._clock()
        found: list[ValueParts | None] = []
        with self._lock:
            for one in wanted:
                value = self._find(one) if began < deadline else None
                if value is None:
                    break
                found.append(tuple(memoryview(value.data)[start:end] for start, end in one.spans))
            hits, stats = len(found), self._stats
            self._stats = replace(
                stats,
                hits=stats.hits + hits,
                misses=stats.misses + len(wanted) - hits,
                bytes_read=stats.bytes_read + sum(one.num_bytes for one in wanted[:hits]),
                reads=stats.reads + 1,
                read_s=stats.read_s + self._clock() - began,
            )
        return [*found, *[None] * (len(wanted) - hits)]

    @property
    def away(self) -> bool:
        return False

    def count_stored(self, wanted: Sequence[ValueQuery], owner: str, deadline: float) -> int:
        with self._lock:
            values = [self._values.get(one.key) for one in wanted]
        there = [value is not None and len(value.data) == one.size for one, value in zip(wanted, values, strict=True)]
        return (*there, False).index(False)

    def claim(self, wanted: ValueQuery, deadline: float, *, anew: bool = False) -> bool:
        with self._lock:
            value = self._values.get(wanted.key)
        return anew or value is None or len(value.data) != wanted.size

    def put(self, key: bytes, parts: Sequence[Buffer], owner: str) -> bool:
        began = self._clock()
        data = b"".join(parts)
        with self._lock:
            if self._closed or len(data) > self.capacity:
                self._drop("closed" if self._closed else "too_large")
                return False
            self._remove(key)
            while self._nbytes + len(data) > self.capacity:
                self._remove(next(iter(self._values)))
            self._values[key] = _MemoryValue(data, owner)
            self._nbytes += len(data)
            stats = self._stats
            self._stats = replace(
                stats,
                stored=stats.stored + 1,
                bytes_written=stats.bytes_written + len(data),
                writes=stats.writes + 1,
                write_s=stats.write_s + self._clock() - began,
            )
        return True

    def forget(self, owner: str | None) -> None:
        with self._lock:
            for key in [key for key, value in self._values.items() if owner is None or value.owner == owner]:
                self._remove(key)

    def stats(self) -> StoreStats:
        with self._lock:
            return replace(self._stats, values=len(self._values), nbytes=self._nbytes)

    def flush(self, deadline: float) -> None:
        return None  # `put` has written the value when it returns

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._values.clear()
            self._nbytes = 0

    def _find(self, wanted: ValueQuery) -> _MemoryValue | None:
        value = self._values.get(wanted.key)
        if value is None:
            return None
        if len(value.data) != wanted.size:
            self._stats = replace(self._stats, errors=_add_one(self._stats.errors, "size"))
            return None
        self._values.move_to_end(wanted.key)
        return value

    def _remove(self, key: bytes) -> None:
        value = self._values.pop(key, None)
        self._nbytes -= len(value.data) if value is not None else 0

    def _drop(self, reason: str) -> None:
        self._stats = replace(self._stats, dropped=_add_one(self._stats.dropped, reason))


def _add_one(counts: Mapping[str, int], reason: str) -> dict[str, int]:
    return {**counts, reason: counts.get(reason, 0) + 1}
