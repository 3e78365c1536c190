"""Scaling policy `queue`: as many replicas in each pool as keep the load on each near a target."""

from __future__ import annotations

import math
from dataclasses import replace

from ...routing.prediction.latency_model import Slo
from .scaling_hysteresis import (
    ExternalScalingDetector,
    IdleTimer,
    ObservedTime,
    OverdueStarts,
    SlidingMaximum,
    choose_first_pool,
    target_change,
)
from .scaling_policy import FleetObservation, PoolObservation, ReplicaTarget


class QueuePolicy:
    """Policy that scales each pool by itself, without regard to costs and speeds.

    While requests are held because there is no replica, it starts one in one pool. If that start is long overdue, it
    starts one in another pool.

    running        wanted number of sequences per replica, running or waiting
    queued_tokens  wanted number of waiting prompt tokens per replica
    tolerance      a load that deviates from its target by no more than this share changes nothing
    settle_s       seconds for which fewer replicas must have been enough before one is removed, also after someone else
                   has scaled
    idle_s         seconds without any request after which the last replica is removed, if the minimum is 0
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
        self._desired: dict[str, SlidingMaximum] = {}
        self._idle = IdleTimer()
        self._overdue = OverdueStarts()
        self._time = ObservedTime()
        self._left = ExternalScalingDetector()

    def decide(self, observed: FleetObservation) -> tuple[ReplicaTarget, ...]:
        observed = replace(observed, now=self._time.saw(observed.now))
        for name in self._left.changed_by_others(observed.pools):
            self._desired[name] = SlidingMaximum(self._settle_s)
            self._idle.reset()
        idle = self._idle.saw(observed) >= self._idle_s
        overdue = self._overdue.saw(observed)
        first = choose_first_pool(observed.pools, overdue) if observed.held else None
        targets: list[ReplicaTarget] = []
        for pool in observed.pools:
            if pool is first:
                targets += target_change(
                    pool, 1, f"{observed.held} held: the first replica, ready in {pool.cold_start_s:g} s"
                )
            else:
                targets += self._target(observed.now, pool, idle)
        self._left.record_targets(observed.pools, targets)
        return tuple(targets)

    def _target(self, now: float, pool: PoolObservation, idle: bool) -> tuple[ReplicaTarget, ...]:
        desired, reason = self._of(pool, idle)
        latest = self._desired[pool.name]
        max_desired = int(latest.saw(now, desired))
        if idle:
            return target_change(pool, 0, f"no request for {self._idle_s:g} s")
        if desired > pool.target:
            return target_change(pool, desired, reason)
        if max_desired < pool.target and latest.settled:
            return target_change(pool, max_desired, f"no more than {max_desired} wanted for {self._settle_s:g} s")
        return target_change(pool, pool.target, "within its bounds")

    def _of(self, pool: PoolObservation, idle: bool) -> tuple[int, str]:
        """Return how many replicas bring the pool to its target load, and the reason."""
        sequences = pool.running + pool.waiting
        desired = max(sequences / self._running, pool.queued_tokens / self._queued_tokens)
        # Loads within the tolerance leave the pool as it is.
        if pool.target * (1 - self._tolerance) <= desired <= pool.target * (1 + self._tolerance):
            return pool.target, "near its target"
        minimum = 0 if idle or pool.target == 0 else 1
        return max(math.ceil(desired - 1e-9), minimum), f"{sequences} sequences and {pool.queued_tokens} queued tokens"
