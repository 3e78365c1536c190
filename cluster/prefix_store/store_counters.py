"""Counters of a prefix store. Safe from any thread."""

from __future__ import annotations

import threading
from collections import Counter

from ...replicas.kv.store.prefix_store import BreakerState, StoreStats


class StoreCounters:
    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._read_s = self._write_s = 0.0
        self._errors: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def read(self, num_values: int, hits: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._numbers.update(hits=hits, misses=num_values - hits, bytes_read=nbytes, reads=1)
            self._read_s += seconds

    def missed(self, num_values: int) -> None:
        """Count misses of a read for which Redis was not asked."""
        with self._lock:
            self._numbers["misses"] += num_values

    def written(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._numbers.update(stored=1, bytes_written=nbytes, writes=1)
            self._write_s += seconds

    def error(self, reason: str) -> None:
        with self._lock:
            self._errors[reason] += 1

    def drop(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self._dropped[reason] += count

    def stats(self, breaker: BreakerState, queued: int) -> StoreStats:
        with self._lock:
            names = ("hits", "misses", "stored", "bytes_read", "bytes_written", "reads", "writes")
            return StoreStats(
                **{name: self._numbers[name] for name in names},
                read_s=self._read_s,
                write_s=self._write_s,
                errors=dict(self._errors),
                dropped=dict(self._dropped),
                breaker=breaker,
                queued=queued,
            )
