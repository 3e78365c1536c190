"""What keeps policies from going to and fro: the most that was wanted of late, and how long nothing has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from .state import Observed, PoolState, Target

__all__ = ["Idle", "Latest", "Overdue", "bounded", "first_up", "set_to"]

_OVERDUE = 3.0  # cold starts, and
_OVERDUE_S = 60.0  # so much more


class Latest:
    """The highest value within the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._highest: deque[tuple[float, float]] = deque()  # falling: what a later one exceeds never counts again

    def saw(self, now: float, value: float) -> float:
        while self._highest and self._highest[-1][1] <= value:
            self._highest.pop()
        self._highest.append((now, value))
        while self._highest[0][0] <= now - self._seconds:
            self._highest.popleft()
        return self._highest[0][1]


class Idle:
    """Since when nothing has come, waits or runs."""

    def __init__(self) -> None:
        self._since: float | None = None

    def saw(self, observed: Observed) -> float:
        """Seconds; 0 while there is something to do."""
        pools = observed.pools
        busy = observed.held or observed.requests_per_s > 0 or any(pool.running or pool.waiting for pool in pools)
        if busy:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = observed.now
        return observed.now - self._since


class Overdue:
    """Pools some of whose replicas should have been ready long ago: no GPU is free, perhaps."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, int]] = {}  # name -> when it last got on, and how many were ready then

    def saw(self, observed: Observed) -> frozenset[str]:
        late = set()
        for pool in observed.pools:
            since, ready = self._since.get(pool.name, (observed.now, 0))
            if not pool.starting or pool.ready > ready:
                since = observed.now
            self._since[pool.name] = since, pool.ready
            if observed.now - since > _OVERDUE * pool.cold_start_s + _OVERDUE_S:
                late.add(pool.name)
        return frozenset(late)


def bounded(pool: PoolState, replicas: int) -> int:
    return min(max(replicas, pool.minimum), pool.maximum)


def set_to(pool: PoolState, replicas: int, reason: str) -> tuple[Target, ...]:
    """None where that is what it has."""
    replicas = bounded(pool, replicas)
    return () if replicas == pool.target else (Target(pool.name, replicas, reason),)


def first_up(pools: Sequence[PoolState], late: Collection[str] = ()) -> PoolState | None:
    """Of which pool to start the first replica for requests that wait: the soonest, then the cheapest.

    None: replicas are there, or on their way, or not to be had. Pools named in `late` do not count.
    """
    counted = [pool for pool in pools if pool.name not in late]
    if any(pool.ready or pool.starting or pool.target for pool in counted):
        return None
    allowed = [pool for pool in counted if pool.maximum > 0]
    return min(allowed, key=lambda pool: (pool.cold_start_s, pool.cost_per_hour), default=None)
