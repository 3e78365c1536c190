"""Series of a load test beside Locust's own: each is a row of its tables, and travels from its workers to its master.

Locust's own row of a request has the time to its end. Those here have, in the column of the type, what they measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from motley.cluster.routing.prediction.latency_model import Slo

FIRST_TOKEN, BETWEEN, TOKENS, GOODPUT = "first token", "between tokens", "tokens", "goodput"


class StreamTimer:
    """Timer of one streamed answer.

    environment  Locust's `Environment`; Locust is not imported for it, which would replace sockets of the process
    protocol     name of the row
    tokens       output tokens so far
    """

    def __init__(
        self, environment: Any, protocol: str, slo: Slo, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.tokens = 0
        self._environment, self._protocol, self._slo, self._clock = environment, protocol, slo, clock
        self._began = clock()
        self._first = self._last = 0.0
        self._gaps: list[float] = []
        self._first_tokens = 0

    def message(self, tokens: int) -> None:
        """Record a message that carries part of the answer."""
        now = self._clock()
        if self.tokens:
            self._gaps.append(now - self._last)
        else:
            self._first, self._first_tokens = now, tokens
        self.tokens, self._last = self.tokens + tokens, now

    def ended(self, error: Exception | None = None) -> None:
        """Record the end of the answer in all series. Gaps are recorded together: that costs less than one by one."""
        took_s, stats, name = self._clock() - self._began, self._environment.stats, self._protocol
        self._environment.events.request.fire(
            request_type="end to end", name=name, response_time=1e3 * took_s, response_length=self.tokens,
            exception=error, context={},
        )  # fmt: skip
        if self.tokens:
            stats.log_request(FIRST_TOKEN, name, 1e3 * (self._first - self._began), 0)
            stats.log_request(TOKENS, name, self.tokens, self.tokens)
        for gap_s in self._gaps:
            stats.log_request(BETWEEN, name, 1e3 * gap_s, 0)
        stats.log_request(GOODPUT, name, 1e3 * took_s, self.tokens)
        if why := "failed" if error is not None else self._missed():
            stats.log_error(GOODPUT, name, why)

    def _missed(self) -> str:
        """Return which objective the answer has missed; empty: none."""
        if not self.tokens or self._first - self._began > self._slo.ttft_s:
            return "the first token was late"
        steps = self.tokens - self._first_tokens
        return "tokens came slowly" if steps > 0 and (self._last - self._first) / steps > self._slo.tpot_s else ""
