"""Admission of requests by a replica: it refuses at once, by tokens, rather than queue without end."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from ...errors import Overloaded

MAX_RETRY_AFTER_S = 60
REMEMBERED_STARTS = 64  # the latest requests that began, from which the rate is taken


class AdmissionLimiter:
    """Counter of the requests, and their prompt tokens, that have been admitted and have not begun.

    A request larger than the whole bound is admitted when no other waits, since otherwise it never would be.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        max_waiting_tokens: int,
        prefill_tokens_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting = 0
        self.waiting_tokens = 0
        self._max_waiting = max_waiting
        self._max_tokens = max_waiting_tokens
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._clock = clock
        self._begun: deque[float] = deque(maxlen=REMEMBERED_STARTS)

    def enter(self, tokens: int) -> None:
        """Admit a request with this many prompt tokens. Raises Overloaded, with the seconds after which a retry should
        succeed.
        """
        full = self.waiting > 0 and self.waiting_tokens + tokens > self._max_tokens
        if full or self.waiting >= self._max_waiting:
            raise Overloaded(
                f"the queue is full: {self.waiting} requests with {self.waiting_tokens} prompt tokens are waiting",
                code="queue_full",
                retry_after_s=self.retry_after_s(),
            )
        self.waiting += 1
        self.waiting_tokens += tokens

    def began(self, tokens: int) -> None:
        """Count out a request that begins."""
        self._begun.append(self._clock())
        self.left(tokens)

    def left(self, tokens: int) -> None:
        """Count out a request that ended before it began. `began` has counted out the others."""
        self.waiting -= 1
        self.waiting_tokens -= tokens
        assert self.waiting >= 0 <= self.waiting_tokens

    def retry_after_s(self) -> int:
        """Return the whole seconds, 1 to 60, in which all requests that wait now should have begun.

        The pace is that of the latest requests that began; before any has, it is the prefill rate measured at start.
        """
        if len(self._begun) > 1:
            seconds = self.waiting * (self._clock() - self._begun[0]) / len(self._begun)
        elif self._prefill_tokens_per_s > 0:
            seconds = self.waiting_tokens / self._prefill_tokens_per_s
        else:
            seconds = 0.0
        return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_S)
