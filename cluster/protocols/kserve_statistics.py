"""What Triton's statistics tell, of the requests of KServe's protocol that this ingress has served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Durations", "InferStatistics"]


@dataclass(slots=True)
class Durations:
    """How many there were, and nanoseconds of all of them together."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 1e9)


class InferStatistics:
    """`succeeded`, `failed`: from a request's coming to its end. A client that leaves has let it fail.

    last_ms  milliseconds since 1970 at which the last one began; 0: there was none
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self.succeeded, self.failed = Durations(), Durations()
        self.last_ms = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One request."""
        began, self.last_ms = self._clock(), round(self._wall_clock() * 1000)
        ended = self.failed
        try:
            yield
            ended = self.succeeded
        finally:
            ended.add(self._clock() - began)
