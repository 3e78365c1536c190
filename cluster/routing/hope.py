"""Whether a request could be answered in time at all: what each replica would do if it were empty. No Ray.

A bound, of what replicas have measured and been seen to do since: what it calls hopeless no patience helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from .contexts import Contexts
from .terms import Ask, Slo, Speed

__all__ = ["Hope", "Hopes", "Idle", "idle"]

OLD_S = 1.0  # how old it may be
FASTER = 2.0  # than its own corrections say a replica may be for a time, by what all of them have in common


class Idle(NamedTuple):
    """A replica without anything to do: tokens of a prompt per second, seconds per token after it, and its context."""

    row: int
    prefill: float
    tpot_s: float
    context: int


def idle(row: int, speed: Speed, off: tuple[float, float], context: int) -> Idle:
    """off: corrections of the time to the first token and of that per token."""
    return Idle(row, speed.prefill_tokens_per_s / off[0], speed.decode_s[0] * off[1], context)


class Hope:
    """`idle`: all that may be chosen."""

    def __init__(self, idle: Iterable[Idle]) -> None:
        every = list(idle)
        self._rows = np.array([each.row for each in every], dtype=int)
        self._prefill, self._tpot, self._context = (
            np.array([each[column] for each in every], dtype=float) for column in (1, 2, 3)
        )
        self._at = {each.row: at for at, each in enumerate(every)}

    def least_s(self, ask: Ask, slo: Slo) -> float:
        """Seconds to the first token, were the best replica empty; infinite: none would keep the time per token."""
        return float(self._seconds(ask, slo).min(initial=math.inf))

    def rows(self, ask: Ask, slo: Slo, within_s: float) -> list[int]:
        """The replicas that would begin it within so many seconds, were they empty."""
        return [int(row) for row in self._rows[self._seconds(ask, slo) <= within_s]]

    def _seconds(self, ask: Ask, slo: Slo) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        fetched = max(ask.stored.values(), default=0) if ask.stored else 0  # by any of them, and at once: it is a bound
        tokens = np.full(len(self._rows), max(1.0, ask.prompt_tokens - fetched))
        for row, cached in (ask.cached or {}).items():
            if row in self._at:
                tokens[self._at[row]] = min(tokens[self._at[row]], max(1.0, ask.prompt_tokens - cached))
        fits = (self._context >= ask.context) & (self._tpot <= FASTER * slo.tpot_s)
        return np.where(fits, tokens / self._prefill, math.inf)


class Hopes:
    """The `Hope` of an ingress's replicas, as they are or were at most `OLD_S` ago, by the clock.

    contexts  has another version as soon as there are other replicas
    idle      lists those that may be chosen now
    """

    def __init__(self, clock: Callable[[], float], contexts: Contexts, idle: Callable[[], Iterable[Idle]]) -> None:
        self._clock, self._contexts, self._idle = clock, contexts, idle
        self._hope, self._at, self._version = Hope(()), -math.inf, -1

    def now(self) -> Hope:
        now, version = self._clock(), self._contexts.version
        if version != self._version or now - self._at > OLD_S:
            self._hope, self._at, self._version = Hope(self._idle()), now, version
        return self._hope
