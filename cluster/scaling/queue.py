"""So many replicas in each pool that what waits and runs on each of them stays near a target."""

from __future__ import annotations

import math
from dataclasses import replace

from ..routing.predict import Slo
from .state import Observed, PoolState, Target
from .steady import Idle, Latest, LeftTargets, ObservedTime, first_up, set_to

__all__ = ["Queue"]


class Queue:
    """Each pool for itself, whatever its replicas are: it knows neither costs nor speeds.

    running, queued_tokens  wanted per replica: sequences that run or wait, and tokens of prompts that wait
    tolerance               a load so close to the target changes nothing
    settle_s                fewer replicas are wanted for so long before one goes, also after somebody else has scaled
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
        self._time = ObservedTime()
        self._left = LeftTargets()

    def decide(self, observed: Observed) -> tuple[Target, ...]:
        observed = replace(observed, now=self._time.saw(observed.now))
        for name in self._left.changed_by_others(observed.pools):
            self._wanted[name] = Latest(self._settle_s)
            self._idle.begin_anew()
        idle = self._idle.saw(observed) >= self._idle_s
        first = first_up(observed.pools) if observed.held else None
        targets: list[Target] = []
        for pool in observed.pools:
            if pool is first:
                targets += set_to(pool, 1, f"{observed.held} held: the first replica, ready in {pool.cold_start_s:g} s")
            else:
                targets += self._target(observed.now, pool, idle)
        self._left.leave(observed.pools, targets)
        return tuple(targets)

    def _target(self, now: float, pool: PoolState, idle: bool) -> tuple[Target, ...]:
        wanted, reason = self._of(pool, idle)
        latest = self._wanted[pool.name]
        most = int(latest.saw(now, wanted))
        if idle:
            return set_to(pool, 0, f"no request for {self._idle_s:g} s")
        if wanted > pool.target:
            return set_to(pool, wanted, reason)
        if most < pool.target and latest.settled:
            return set_to(pool, most, f"no more than {most} wanted for {self._settle_s:g} s")
        return set_to(pool, pool.target, "within its bounds")

    def _of(self, pool: PoolState, idle: bool) -> tuple[int, str]:
        """How many would bring it to the target, and what they are for."""
        sequences = pool.running + pool.waiting
        wanted = max(sequences / self._running, pool.queued_tokens / self._queued_tokens)
        # Loads within the tolerance leave the pool as it is.
        if pool.target * (1 - self._tolerance) <= wanted <= pool.target * (1 + self._tolerance):
            return pool.target, "near its target"
        least = 0 if idle or pool.target == 0 else 1
        return max(math.ceil(wanted - 1e-9), least), f"{sequences} sequences and {pool.queued_tokens} queued tokens"
