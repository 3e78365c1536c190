"""Histogram of measured values: a list of counters by size, for metrics that are exported now and then."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """State of a histogram at one moment: the number of values in each bucket.

    bounds  ascending; a bucket counts values up to its bound, and the last bucket, without a bound, all larger ones
    counts  one more than bounds
    total   sum of all values
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def __post_init__(self) -> None:
        assert len(self.counts) == len(self.bounds) + 1

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield the buckets as Prometheus defines them: (a bucket's bound as text, number of values up to it)."""
        reached = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            reached += count
            yield "+Inf" if bound == float("inf") else f"{bound:g}", reached


class Histogram:
    """Histogram that one thread writes, without a lock; other threads may read it meanwhile, and be one value
    behind.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def spread(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)
