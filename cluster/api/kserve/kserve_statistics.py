"""Counters for Triton's statistics, of the KServe requests that this ingress has served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class DurationTotals:
    """Number of requests, and the nanoseconds that all of them took together."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 1e9)


class InferStatistics:
    """Statistics of requests: `succeeded` and `failed` measure from arrival to end. A cancelled request has failed.

    last_ms  milliseconds since 1970 at which the last request began; 0 if there was none
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self.succeeded, self.failed = DurationTotals(), DurationTotals()
        self.last_ms = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one request and its duration."""
        began, self.last_ms = self._clock(), round(self._wall_clock() * 1000)
        ended = self.failed
        try:
            yield
            ended = self.succeeded
        finally:
            ended.add(self._clock() - began)
