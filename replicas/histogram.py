"""How many of what was measured was how large: a list of counters, for whoever exports them now and then."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Histogram", "Spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """
    bounds  ascending; a bucket's values are up to its bound, and the last bucket's, which has none, above all of them
    counts  one more than bounds
    total   of all values
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
        """As Prometheus has it: (a bucket's bound as text, values up to it)."""
        reached = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            reached += count
            yield "+Inf" if bound == float("inf") else f"{bound:g}", reached


class Histogram:
    """Of one thread's, without a lock; another one may read it meanwhile, and be a value behind."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def spread(self) -> Spread:
        return Spread(self._bounds, tuple(self._counts), self._total)
