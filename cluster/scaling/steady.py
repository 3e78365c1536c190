"""What keeps policies from going to and fro: the most that was wanted of late, and how long nothing has come.

How long something has been so is counted in seconds that were observed. A policy that is new, or made anew since the
control plane was started again or was given another policy, has observed nothing yet; and what somebody else sets is
left alone until it has been observed for as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from .arrivals import ASK_S
from .state import Observed, PoolState, Target

__all__ = ["Idle", "Latest", "LeftTargets", "ObservedTime", "Overdue", "bounded", "first_up", "set_to"]

MAX_STEP_S = 3 * ASK_S  # that one observation vouches for: of a longer gap nobody knows what was in it
_OVERDUE = 3.0  # cold starts, and
_OVERDUE_S = 60.0  # so much more


class ObservedTime:
    """Counts the seconds that were observed. A gap, or a clock that is set, counts as MAX_STEP_S at most."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._observed_s = 0.0

    def saw(self, now: float) -> float:
        """Returns the seconds since the first observation that were observed. `now`: by any clock."""
        if self._last is not None:
            self._observed_s += min(max(now - self._last, 0.0), MAX_STEP_S)
        self._last = now
        return self._observed_s


class LeftTargets:
    """Remembers at what number of replicas a policy left each pool, and so tells what somebody else has set since."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def changed_by_others(self, pools: Sequence[PoolState]) -> frozenset[str]:
        """Returns the names of the pools that an operator or new bounds have scaled, and of those that are new."""
        return frozenset(pool.name for pool in pools if self._left.get(pool.name) != pool.target)

    def leave(self, pools: Sequence[PoolState], targets: Sequence[Target]) -> None:
        """Takes down what the policy has just decided."""
        decided = {target.pool: target.replicas for target in targets}
        self._left = {pool.name: decided.get(pool.name, pool.target) for pool in pools}


class Latest:
    """The highest value within the last `seconds` (of 0: the last value), and whether so long has been observed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._now = 0.0
        self._highest: deque[tuple[float, float]] = deque()  # falling: what a later one exceeds never counts again

    @property
    def settled(self) -> bool:
        """Whether the values span all of `seconds`; what was highest before is not known otherwise."""
        return self._since is not None and self._now - self._since >= self._seconds

    def begin_anew(self) -> None:
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


class Idle:
    """Since when nothing has come, waits or runs."""

    def __init__(self) -> None:
        self._since: float | None = None

    def begin_anew(self) -> None:
        self._since = None

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
