"""When a server that fails is left alone, and when it is asked again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...replicas.prefix.store import Breaker

__all__ = ["CircuitBreaker"]

FAILURES = 3  # in a row, and it opens
FIRST_S = 0.25  # it stays open for so long, then twice as long each time
LONGEST_S = 2.0


class CircuitBreaker:
    """Closed, open, half-open. Safe from any thread.

    While it is open nobody is admitted; whoever keeps the connections asks in the background, so that no request pays
    for it, and says what came of it. Half-open it admits one call at a time: the first that succeeds closes it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = Breaker.CLOSED
        self._failures = 0
        self._pause_s = FIRST_S
        self._until = 0.0
        self._trying = False
        self._lock = threading.Lock()

    @property
    def state(self) -> Breaker:
        return self._state

    def admit(self) -> bool:
        """Whether to ask; who is admitted says what came of it: `succeeded`, `failed` or `undecided`."""
        with self._lock:
            if self._state is not Breaker.HALF_OPEN:
                return self._state is Breaker.CLOSED
            admitted, self._trying = not self._trying, True
            return admitted

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._trying = False
            if self._state is Breaker.HALF_OPEN:
                self._state, self._pause_s = Breaker.CLOSED, FIRST_S

    def failed(self) -> None:
        """A call, or an attempt to connect."""
        with self._lock:
            self._failures += 1
            self._trying = False
            if self._state is Breaker.CLOSED and self._failures >= FAILURES:
                self._open()
            elif self._state is not Breaker.CLOSED:
                self._pause_s = min(2 * self._pause_s, LONGEST_S)
                self._open()

    def undecided(self) -> None:
        """It had no fair chance."""
        with self._lock:
            self._trying = False

    def answered(self) -> None:
        """To who asked in the background."""
        with self._lock:
            if self._state is Breaker.OPEN:
                self._state = Breaker.HALF_OPEN
                self._trying = False

    def due_s(self) -> float | None:
        """How long not to ask in the background; None unless it is open."""
        with self._lock:
            return max(0.0, self._until - self._clock()) if self._state is Breaker.OPEN else None

    def _open(self) -> None:
        self._state = Breaker.OPEN
        self._until = self._clock() + self._pause_s
