"""Damping of scaling policies: the highest recent demand, and how long nothing has arrived.

Durations are counted in seconds that were observed. A policy that is new, because the control plane was restarted or
was given another policy, has observed nothing yet. A target that someone else sets is left alone until it has been
observed for as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from .arrival_rates import POLICY_INTERVAL_S
from .scaling_policy import FleetObservation, PoolObservation, ReplicaTarget

MAX_STEP_S = (
    3 * POLICY_INTERVAL_S
)  # longest time that one observation stands for; what happened in longer gaps is unknown
_OVERDUE = 3.0  # a replica is overdue after this many cold start times,
_OVERDUE_S = 60.0  # plus this time


class ObservedTime:
    """Counter of observed seconds. A gap between observations, or a changed clock, counts as MAX_STEP_S at most."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._observed_s = 0.0

    def saw(self, now: float) -> float:
        """Record an observation at `now` (of any clock), and return the observed seconds since the first one."""
        if self._last is not None:
            self._observed_s += min(max(now - self._last, 0.0), MAX_STEP_S)
        self._last = now
        return self._observed_s


class ExternalScalingDetector:
    """Memory of the targets that a policy left, which shows what someone else has set since."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def changed_by_others(self, pools: Sequence[PoolObservation]) -> frozenset[str]:
        """Return the names of the pools that an operator or new bounds have scaled, and of new pools."""
        return frozenset(pool.name for pool in pools if self._left.get(pool.name) != pool.target)

    def record_targets(self, pools: Sequence[PoolObservation], targets: Sequence[ReplicaTarget]) -> None:
        """Record the targets after the policy's decision."""
        decided = {target.pool: target.replicas for target in targets}
        self._left = {pool.name: decided.get(pool.name, pool.target) for pool in pools}


class SlidingMaximum:
    """Highest value within the last `seconds` (with 0: the last value), and whether that time has been observed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._now = 0.0
        self._highest: deque[tuple[float, float]] = deque()  # falling: an exceeded value never counts again

    @property
    def settled(self) -> bool:
        """Whether the values span all of `seconds`; otherwise earlier, higher values may be unknown."""
        return self._since is not None and self._now - self._since >= self._seconds

    def reset(self) -> None:
        self._since = None
        self._highest.clear()

    def saw(self, now: float, value: float) -> float:
        self._now = now
        if self._since is None:
            self._since = now
        while self._highest and self._highest[-1][1] <= value:
            self._highest.pop()
        self._highest.append((now, value))
        while len(self._highest) > 1 and self._highest[0][0] <= now - self._seconds:
            self._highest.popleft()
        return self._highest[0][1]


class IdleTimer:
    """Measurement of how long no request has arrived, waited or run."""

    def __init__(self) -> None:
        self._since: float | None = None

    def reset(self) -> None:
        self._since = None

    def saw(self, observed: FleetObservation) -> float:
        """Return the seconds without requests; 0 while there are any."""
        pools = observed.pools
        busy = observed.held or observed.requests_per_s > 0 or any(pool.running or pool.waiting for pool in pools)
        if busy:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = observed.now
        return observed.now - self._since


class OverdueStarts:
    """Detector of pools that are not to be counted on: their replicas should have been ready long ago, perhaps because
    no GPU is free, or it is known that none can be placed.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, int]] = {}  # pool -> time of its last progress, replicas ready then

    def saw(self, observed: FleetObservation) -> frozenset[str]:
        overdue = set()
        for pool in observed.pools:
            progress_s, ready = self._since.get(pool.name, (observed.now, 0))
            if not pool.starting or pool.ready > ready:
                progress_s = observed.now
            self._since[pool.name] = progress_s, pool.ready
            never = not pool.placeable and not pool.ready
            if never or observed.now - progress_s > _OVERDUE * pool.cold_start_s + _OVERDUE_S:
                overdue.add(pool.name)
        return frozenset(overdue)


def clamp_replicas(pool: PoolObservation, replicas: int) -> int:
    return min(max(replicas, pool.minimum), pool.maximum)


def target_change(pool: PoolObservation, replicas: int, reason: str) -> tuple[ReplicaTarget, ...]:
    """Return the new target within the pool's bounds; nothing if the pool has it already."""
    replicas = clamp_replicas(pool, replicas)
    return () if replicas == pool.target else (ReplicaTarget(pool.name, replicas, reason),)


def choose_first_pool(pools: Sequence[PoolObservation], overdue: Collection[str] = ()) -> PoolObservation | None:
    """Return the pool whose first replica should start for waiting requests: the fastest to start, then the cheapest.

    None: some replica exists or is coming, or none is allowed. Pools named in `overdue` do not count, unless no other
    is allowed any: then one is wanted of those all the same, so that the reason why it does not come is reported.
    """
    allowed = [pool for pool in pools if pool.maximum or pool.target or pool.ready or pool.starting]
    counted = [pool for pool in allowed if pool.name not in overdue] or allowed
    if any(pool.ready or pool.starting or pool.target for pool in counted):
        return None
    return min(counted, key=lambda pool: (pool.cold_start_s, pool.cost_per_hour), default=None)
