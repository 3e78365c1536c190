"""So many replicas in each pool that what waits and runs on each of them stays near a target."""

from __future__ import annotations

import math

from ..routing.predict import Slo
from .state import Observed, PoolState, Target
from .steady import Idle, Latest, first_up, set_to

__all__ = ["Queue"]


class Queue:
    """Each pool for itself, whatever its replicas are: it knows neither costs nor speeds.

    running, queued_tokens  wanted per replica: sequences that run or wait, and tokens of prompts that wait
    tolerance               a load so close to the target changes nothing
    settle_s                fewer replicas are wanted for so long before one goes
    idle_s                  without any request until the last one goes, where the minimum is 0
    """

    def __init__(
        self, slo: Slo, *, running: float = 16.0, queued_tokens: float = 4096.0, tolerance: float = 0.2,
        settle_s: float = 300.0, idle_s: float = 300.0,
    ) -> None:  # fmt: skip
        self.slo = slo
        self._running = running
        self._queued_tokens = queued_tokens
        self._tolerance = tolerance
        self._settle_s = settle_s
        self._idle_s = idle_s
        self._wanted: dict[str, Latest] = {}
        self._idle = Idle()

    def decide(self, observed: Observed) -> tuple[Target, ...]:
        idle = self._idle.saw(observed) >= self._idle_s
        first = first_up(observed.pools) if observed.held else None
        targets: list[Target] = []
        for pool in observed.pools:
            wanted, reason = self._of(pool, idle)
            settled = self._wanted.setdefault(pool.name, Latest(self._settle_s)).saw(observed.now, wanted)
            if pool is first:
                targets += set_to(pool, 1, f"{observed.held} held: the first replica, ready in {pool.cold_start_s:g} s")
            elif idle:
                targets += set_to(pool, 0, f"no request for {self._idle_s:g} s")
            elif wanted > pool.target:
                targets += set_to(pool, wanted, reason)
            elif settled < pool.target:
                targets += set_to(pool, int(settled), f"no more than {int(settled)} wanted for {self._settle_s:g} s")
            else:
                targets += set_to(pool, pool.target, "within its bounds")
        return tuple(targets)

    def _of(self, pool: PoolState, idle: bool) -> tuple[int, str]:
        """How many would bring it to the target, and what they are for."""
        sequences = pool.running + pool.waiting
        wanted = max(sequences / self._running, pool.queued_tokens / self._queued_tokens)
        # Loads within the tolerance leave the pool as it is.
        if pool.target * (1 - self._tolerance) <= wanted <= pool.target * (1 + self._tolerance):
            return pool.target, "near its target"
        least = 0 if idle or pool.target == 0 else 1
        return max(math.ceil(wanted - 1e-9), least), f"{sequences} sequences and {pool.queued_tokens} queued tokens"
