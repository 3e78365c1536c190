"""What has come to one ingress, and what became of it: counted for whoever scales."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...replicas.errors import Overloaded
from ...replicas.protocol import Request, StreamMessage
from ..fleet.status import Demand
from .predict import Slo

__all__ = ["Seen", "Tally"]


class Seen:
    """One request, as its reader has it: the time a message waits for the reader counts as any other."""

    def __init__(self, clock: Callable[[], float], choices: int) -> None:
        self.output_tokens = 0
        self._clock = clock
        self._choices = choices
        self._came = clock()
        self._first = self._last = 0.0
        self._first_tokens = 0

    def message(self, message: StreamMessage) -> None:
        tokens = sum(len(delta.token_ids) for delta in message.deltas)
        if not tokens:
            return
        self._last = self._clock()
        if not self.output_tokens:
            self._first, self._first_tokens = self._last, tokens
        self.output_tokens += tokens

    def late(self, slo: Slo) -> bool:
        if not self.output_tokens:
            return False
        steps = (self.output_tokens - self._first_tokens) / self._choices
        return self._first - self._came > slo.ttft_s or (steps > 0 and (self._last - self._first) / steps > slo.tpot_s)


class Tally:
    """`slo`: what counts as late; None: nothing does."""

    def __init__(self, slo: Slo | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.slo = slo
        self._clock = clock
        self._requests = self._refused = self._late = self._prompt_tokens = self._output_tokens = 0

    @contextmanager
    def counted(self, request: Request) -> Iterator[Seen]:
        """From its coming to its end."""
        self._requests += 1
        self._prompt_tokens += len(request.prompt_ids)
        seen = Seen(self._clock, request.sampling.n)
        try:
            yield seen
        except Overloaded:
            self._refused += not seen.output_tokens
            raise
        finally:
            self._output_tokens += seen.output_tokens
            self._late += self.slo is not None and seen.late(self.slo)

    def demand(self, held: int) -> Demand:
        return Demand(self._requests, self._refused, self._late, self._prompt_tokens, self._output_tokens, held)
