"""Lower bounds of the time to first token: what each replica would do for a request if it were idle. No Ray.

The bounds come from what replicas have measured and how they have performed since. A request that misses its objectives
even by these bounds gains nothing from waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from .context_lengths import ContextLengths
from .routing_query import ReplicaSpeed, RoutingQuery, Slo

OLD_S = 1.0  # maximum age of the bounds before they are computed anew
FASTER = 2.0  # factor by which a replica may for a time be faster than its own corrections say


class IdleReplicaSpeed(NamedTuple):
    """Speed of an idle replica: prompt tokens per second, seconds per output token, and tokens of its context."""

    row: int
    prefill: float
    tpot_s: float
    context: int


def idle_replica_speed(row: int, speed: ReplicaSpeed, off: tuple[float, float], context: int) -> IdleReplicaSpeed:
    """Return the idle speed of a replica, corrected by what was observed.

    off  corrections of the time to first token and of the time per token: observed over predicted
    """
    return IdleReplicaSpeed(row, speed.prefill_tokens_per_s / off[0], speed.decode_s[0] * off[1], context)


class TtftLowerBound:
    """Lower bounds of the times of requests on a fixed set of replicas.

    idle  idle speeds of all replicas that may be chosen
    """

    def __init__(self, idle: Iterable[IdleReplicaSpeed]) -> None:
        every = list(idle)
        self._rows = np.array([each.row for each in every], dtype=int)
        self._prefill, self._tpot, self._context = (
            np.array([each[column] for each in every], dtype=float) for column in (1, 2, 3)
        )
        self._at = {each.row: at for at, each in enumerate(every)}

    def min_ttft_s(self, query: RoutingQuery, slo: Slo) -> float:
        """Return the seconds to first token on the best replica if idle; infinite if none meets the time per token."""
        return float(self._seconds(query, slo).min(initial=math.inf))

    def rows(self, query: RoutingQuery, slo: Slo, within_s: float) -> list[int]:
        """Return the rows of replicas that, if idle, could give the first token within `within_s` seconds and meet the
        SLO's time per token.
        """
        return [int(row) for row in self._rows[self._seconds(query, slo) <= within_s]]

    def _seconds(self, query: RoutingQuery, slo: Slo) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        fetched = max(query.stored.values(), default=0) if query.stored else 0  # a bound: any replica, at once
        tokens = np.full(len(self._rows), max(1.0, query.prompt_tokens - fetched))
        for row, cached in (query.cached or {}).items():
            if row in self._at:
                tokens[self._at[row]] = min(tokens[self._at[row]], max(1.0, query.prompt_tokens - cached))
        fits = (self._context >= query.context) & (self._tpot <= FASTER * slo.tpot_s)
        return np.where(fits, tokens / self._prefill, math.inf)


class TtftLowerBoundCache:
    """Cache of the `TtftLowerBound` of an ingress's replicas, which is at most `OLD_S` old.

    clock     returns the current time in seconds
    contexts  its version changes as soon as replicas are added or removed
    idle      lists the idle speeds of the replicas that may be chosen now
    """

    def __init__(
        self, clock: Callable[[], float], contexts: ContextLengths, idle: Callable[[], Iterable[IdleReplicaSpeed]]
    ) -> None:
        self._clock, self._contexts, self._idle = clock, contexts, idle
        self._bound, self._at, self._version = TtftLowerBound(()), -math.inf, -1

    def now(self) -> TtftLowerBound:
        now, version = self._clock(), self._contexts.version
        if version != self._version or now - self._at > OLD_S:
            self._bound, self._at, self._version = TtftLowerBound(self._idle()), now, version
        return self._bound
