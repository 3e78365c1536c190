"""Statistics of the requests that one ingress has had and of what became of them, for the autoscaler and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ...replicas.errors import Overloaded
from ...replicas.types import FinishReason, Request, StreamMessage
from .fleet_status import DemandCounters
from .ingress_counters import IngressCounters, PoolCounters
from .prediction.latency_model import Slo


class RequestTimer:
    """Measurement of one request as its client sees it: time that a message waits for the client counts too.

    If the request moves between pools, each pool is charged with what came from there: the first token, a gap that ends
    with a message, the end.
    """

    def __init__(self, clock: Callable[[], float], request: Request, pools: dict[str, PoolCounters]) -> None:
        self.output_tokens = 0
        self._clock = clock
        self._pools = pools
        self._pool: str | None = None
        self._here: PoolCounters | None = None  # counters of the pool that the last message came from
        self._began: PoolCounters | None = None  # counters of the pool that the first message came from
        self._messages = 0  # those that carry tokens
        self._choices = self._unfinished = request.sampling.n
        self._prompt_tokens = len(request.prompt_ids)
        self._arrived = clock()
        self._first = self._last = 0.0
        self._first_tokens = 0

    def message(self, message: StreamMessage, pool: str) -> None:
        here = self._here
        if here is None or pool != self._pool:
            here = self._move(pool)
        tokens = 0
        for delta in message.deltas:
            tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                here.finished[delta.finish_reason] += 1
                self._unfinished -= 1
        if not tokens:
            return
        now = self._clock()
        here.generation_tokens += tokens
        if self._messages == 0:
            self._first, self._first_tokens = now, tokens
        else:
            here.itl.add(now - self._last)
        if self._messages == 1 and self._began is not None:
            self._began.ttft.add(self._first - self._arrived)
        self._messages += 1
        self._last = now
        self.output_tokens += tokens

    def left(self) -> None:
        """Record that the client has left before the end of the answer."""
        here = self._here or self._counters("")  # nothing had come from any pool
        here.finished[FinishReason.CANCELLED] += self._unfinished

    def ended(self) -> None:
        """Record the end of the request.

        An answer in one message does not show when its first token was ready, unless it has no other tokens.
        """
        if self._here is None:
            return
        self._here.output_lengths.add(self.output_tokens)
        if not self._messages:
            return
        if self._messages == 1 and self._first_tokens <= self._choices:
            self._here.ttft.add(self._first - self._arrived)
        self._here.e2e.add(self._clock() - self._arrived)
        if (tpot_s := self._tpot_s) is not None:
            self._here.tpot.add(tpot_s)

    def _move(self, pool: str) -> PoolCounters:
        here = self._counters(pool)
        if self._began is None:
            self._began = here
            here.prompt_tokens += self._prompt_tokens
            here.prompt_lengths.add(self._prompt_tokens)
        self._pool, self._here = pool, here
        return here

    def _counters(self, pool: str) -> PoolCounters:
        if pool not in self._pools:
            self._pools[pool] = PoolCounters()
        return self._pools[pool]

    @property
    def _tpot_s(self) -> float | None:
        """Mean seconds per token after the first message; None if there is none."""
        steps = (self.output_tokens - self._first_tokens) / self._choices
        return (self._last - self._first) / steps if steps > 0 else None

    def missed(self, slo: Slo) -> bool:
        if not self.output_tokens:
            return False
        tpot_s = self._tpot_s
        return self._first - self._arrived > slo.ttft_s or (tpot_s is not None and tpot_s > slo.tpot_s)


class IngressStats:
    """Counters of one ingress's requests.

    slo       objectives that decide which requests count as late; None: none do
    pools     counters by pool: of those that there are, and of those that have answered
    counters  counters of all requests
    """

    def __init__(self, slo: Slo | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.slo = slo
        self.pools: dict[str, PoolCounters] = {}
        self.counters = IngressCounters()
        self._clock = clock
        self._refused = self._prompt_tokens = self._output_tokens = 0

    def know(self, pools: Iterable[str]) -> None:
        """Count from 0 for these pools too, before they have answered anything."""
        for pool in pools:
            self.pools.setdefault(pool, PoolCounters())

    @contextmanager
    def counted(self, request: Request) -> Iterator[RequestTimer]:
        """Count a request from its arrival to its end, while the context is open."""
        self.counters.requests += 1
        self._prompt_tokens += len(request.prompt_ids)
        timer = RequestTimer(self._clock, request, self.pools)
        try:
            yield timer
        except Overloaded:
            self._refused += not timer.output_tokens
            raise
        except (GeneratorExit, asyncio.CancelledError):
            timer.left()
            raise
        finally:
            timer.ended()
            self._output_tokens += timer.output_tokens
            self.counters.late += self.slo is not None and timer.missed(self.slo)

    def demand(self, num_held: int) -> DemandCounters:
        return DemandCounters(
            self.counters.requests,
            self._refused,
            self.counters.late,
            self._prompt_tokens,
            self._output_tokens,
            num_held,
        )
