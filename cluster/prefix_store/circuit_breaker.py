"""Circuit breaker: when a failing server is left alone, and when it is tried again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...replicas.kv.store.prefix_store import BreakerState

FAILURES = 3  # failures in a row after which the breaker opens
FIRST_S = 0.25  # time that it stays open, doubled after each further failure up to LONGEST_S
LONGEST_S = 2.0


class CircuitBreaker:
    """Circuit breaker with the states closed, open and half-open. Safe from any thread.

    While it is open no call is admitted. The keeper of the connections tries the server in the background and reports
    the result, so that no request pays for the attempt. Half-open it admits one call at a time; the first success
    closes it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = FIRST_S
        self._until = 0.0
        self._trying = False
        self._lock = threading.Lock()

    @property
    def state(self) -> BreakerState:
        return self._state

    def admit(self) -> bool:
        """Return whether a call is admitted. Its result must be reported: `succeeded`, `failed` or `undecided`."""
        with self._lock:
            if self._state is not BreakerState.HALF_OPEN:
                return self._state is BreakerState.CLOSED
            admitted, self._trying = not self._trying, True
            return admitted

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._trying = False
            if self._state is BreakerState.HALF_OPEN:
                self._state, self._pause_s = BreakerState.CLOSED, FIRST_S

    def failed(self) -> None:
        """Report the failure of a call, or of an attempt to connect."""
        with self._lock:
            self._failures += 1
            self._trying = False
            if self._state is BreakerState.CLOSED and self._failures >= FAILURES:
                self._open()
            elif self._state is not BreakerState.CLOSED:
                self._pause_s = min(2 * self._pause_s, LONGEST_S)
                self._open()

    def undecided(self) -> None:
        """Report a call that had no fair chance, so that it says nothing about the server."""
        with self._lock:
            self._trying = False

    def answered(self) -> None:
        """Report that the server answered an attempt in the background; an open breaker becomes half-open."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                self._state = BreakerState.HALF_OPEN
                self._trying = False

    def due_s(self) -> float | None:
        """Return the seconds until the next attempt in the background; None unless the breaker is open."""
        with self._lock:
            return max(0.0, self._until - self._clock()) if self._state is BreakerState.OPEN else None

    def _open(self) -> None:
        self._state = BreakerState.OPEN
        self._until = self._clock() + self._pause_s
