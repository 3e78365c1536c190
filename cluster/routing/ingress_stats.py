"""Statistics of the requests that one ingress has had and of what became of them, for the autoscaler and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ...replicas.errors import Overloaded
from ...replicas.host.metric_fields import histogram, metrics_of
from ...replicas.kv.histogram import Histogram, HistogramSnapshot
from ...replicas.types import Request, StreamMessage
from .fleet_status import DemandCounters
from .prediction.latency_model import Slo

# Bounds of the buckets, as vLLM has them
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_E2E_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


@dataclass(slots=True, eq=False)
class PoolLatencies:
    """Histograms of one ingress's requests to a pool: seconds to the first token, between messages, and to the end."""

    _ttft: Histogram = field(
        default_factory=partial(Histogram, _TTFT_S),
        metadata=histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival at the ingress to its first token"
        ),
    )
    _itl: Histogram = field(
        default_factory=partial(Histogram, _ITL_S),
        metadata=histogram(
            "inter_token_latency_seconds", "Seconds between two messages of an answer that carry tokens"
        ),
    )
    _e2e: Histogram = field(
        default_factory=partial(Histogram, _E2E_S),
        metadata=histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival at the ingress to the end of its answer"
        ),
    )

    def first(self, seconds: float) -> None:
        self._ttft.add(seconds)

    def gap(self, seconds: float) -> None:
        self._itl.add(seconds)

    def ended(self, seconds: float) -> None:
        self._e2e.add(seconds)

    def spreads(self) -> dict[str, HistogramSnapshot]:
        """Return the histograms by the names of their metrics."""
        return {metric.name: getattr(self, at).spread() for at, metric in metrics_of(PoolLatencies).items()}


class RequestTimer:
    """Measurement of one request as its client sees it: time that a message waits for the client counts too.

    If the request moves between pools, each pool is charged with what came from there: the first token, a gap that ends
    with a message, the end.
    """

    def __init__(self, clock: Callable[[], float], choices: int, latencies: dict[str, PoolLatencies]) -> None:
        self.output_tokens = 0
        self._clock = clock
        self._pools = latencies
        self._pool: str | None = None
        self._here: PoolLatencies | None = None  # histograms of the pool that the last message came from
        self._began: PoolLatencies | None = None  # histograms of the pool that the first message came from
        self._messages = 0
        self._choices = choices
        self._arrived = clock()
        self._first = self._last = 0.0
        self._first_tokens = 0

    def message(self, message: StreamMessage, pool: str) -> None:
        tokens = sum(len(delta.token_ids) for delta in message.deltas)
        if not tokens:
            return
        now = self._clock()
        here = self._here
        if here is None or pool != self._pool:
            here = self._move(pool)
        if self._messages == 0:
            self._first, self._first_tokens, self._began = now, tokens, here
        else:
            here.gap(now - self._last)
        if self._messages == 1 and self._began is not None:
            self._began.first(self._first - self._arrived)
        self._messages += 1
        self._last = now
        self.output_tokens += tokens

    def ended(self) -> None:
        """Record the end of the request.

        An answer in one message does not show when its first token was ready, unless it has no other tokens.
        """
        if self._here is None:
            return
        if self._messages == 1 and self._first_tokens <= self._choices:
            self._here.first(self._first - self._arrived)
        self._here.ended(self._clock() - self._arrived)

    def _move(self, pool: str) -> PoolLatencies:
        if pool not in self._pools:
            self._pools[pool] = PoolLatencies()
        self._pool, self._here = pool, self._pools[pool]
        return self._here

    def missed(self, slo: Slo) -> bool:
        if not self.output_tokens:
            return False
        steps = (self.output_tokens - self._first_tokens) / self._choices
        return self._first - self._arrived > slo.ttft_s or (
            steps > 0 and (self._last - self._first) / steps > slo.tpot_s
        )


class IngressStats:
    """Counters of one ingress's requests.

    slo        objectives that decide which requests count as late; None: none do
    latencies  histograms by pool, for pools that have answered
    """

    def __init__(self, slo: Slo | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.slo = slo
        self.latencies: dict[str, PoolLatencies] = {}
        self._clock = clock
        self._requests = self._refused = self._late = self._prompt_tokens = self._output_tokens = 0

    @contextmanager
    def counted(self, request: Request) -> Iterator[RequestTimer]:
        """Count a request from its arrival to its end, while the context is open."""
        self._requests += 1
        self._prompt_tokens += len(request.prompt_ids)
        timer = RequestTimer(self._clock, request.sampling.n, self.latencies)
        try:
            yield timer
        except Overloaded:
            self._refused += not timer.output_tokens
            raise
        finally:
            timer.ended()
            self._output_tokens += timer.output_tokens
            self._late += self.slo is not None and timer.missed(self.slo)

    def demand(self, num_held: int) -> DemandCounters:
        return DemandCounters(
            self._requests, self._refused, self._late, self._prompt_tokens, self._output_tokens, num_held
        )
