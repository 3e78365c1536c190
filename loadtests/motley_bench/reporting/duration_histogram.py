"""Histogram that holds millions of durations in a few hundred counters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from motley.replicas.errors import MotleyError

_STEP = math.log(1.01)  # buckets are 1% wide
_MIN_S = 1e-7


@dataclass(slots=True)
class DurationHistogram:
    """Histogram of durations in seconds: quantiles are within 1%; count, sum and greatest are exact."""

    counts: Counter[int] = field(default_factory=Counter)
    total: float = 0.0
    greatest: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[int(math.log(seconds / _MIN_S) / _STEP) if seconds > _MIN_S else 0] += 1
        self.total += seconds
        self.greatest = max(self.greatest, seconds)

    def merge(self, other: DurationHistogram) -> None:
        self.counts.update(other.counts)
        self.total += other.total
        self.greatest = max(self.greatest, other.greatest)

    @property
    def count(self) -> int:
        return self.counts.total()

    @property
    def mean(self) -> float:
        return self.total / self.count

    def quantile(self, share: float) -> float:
        """Return the duration at quantile `share`, from 0 to 1. Raises MotleyError if there are no durations."""
        wanted = share * (self.count - 1)
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen > wanted:
                return min(_MIN_S * math.exp((bucket + 0.5) * _STEP), self.greatest)
        raise MotleyError("no request ended within the measured time; measure for more seconds")

    def to_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "total": self.total, "greatest": self.greatest}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        counts = Counter({int(bucket): count for bucket, count in fields["counts"].items()})
        return cls(counts, fields["total"], fields["greatest"])
