"""Scaling policy `slo`: the cheapest replicas that meet the objectives under the expected load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...routing.prediction.latency_model import Slo
from .cheapest_mix import ReplicaClass, cheapest_counts
from .demand_forecast import DemandForecast
from .replica_capacity import OfferedLoad, carried_share
from .scaling_hysteresis import (
    ExternalScalingDetector,
    IdleTimer,
    ObservedTime,
    OverdueStarts,
    choose_first_pool,
    clamp_replicas,
    target_change,
)
from .scaling_policy import FleetObservation, PoolObservation, ReplicaTarget

_MIN_SAVING = 0.1  # minimum saving, as a share of the present cost, for starting replicas of another class


class SloPolicy:
    """Policy that meets the latency objectives at least cost, for the load expected while the slowest pool starts.

    Replicas are added at once and removed slowly. A pool whose speed is not yet known gets its first replica when the
    others are not enough. Replicas that are long overdue are not counted on.

    headroom    share of capacity that is provided beyond the expected load whenever something changes
    settle_s    fewer replicas must have been enough for the highest load expected within this time, all of it observed
                since the policy was created and since someone else has scaled
    cooldown_s  seconds between two reductions, and before the first
    catch_up_s  seconds within which prompts that wait beyond the objective are to be worked off
    idle_s      seconds without any request until all replicas are removed, where minimums are 0
    """

    def __init__(
        self, slo: Slo, *, headroom: float = 0.2, settle_s: float = 300.0, cooldown_s: float = 60.0,
        catch_up_s: float = 60.0, idle_s: float = 300.0,
    ) -> None:  # fmt: skip
        self.slo = slo
        self._headroom = 1 + headroom
        self._settle_s = settle_s
        self._cooldown_s = cooldown_s
        self._idle_s = idle_s
        self._demand = DemandForecast(ttft_s=slo.ttft_s, catch_up_s=catch_up_s, settle_s=settle_s)
        self._idle = IdleTimer()
        self._overdue = OverdueStarts()
        self._lowered_at = 0.0  # time of the last reduction, in observed seconds since the first observation
        self._time = ObservedTime()
        self._left = ExternalScalingDetector()

    def decide(self, observed: FleetObservation) -> tuple[ReplicaTarget, ...]:
        if self._left.changed_by_others(observed.pools):
            self._demand.reset()
            self._idle.reset()
        targets = self._decide(replace(observed, now=self._time.saw(observed.now)))
        self._left.record_targets(observed.pools, targets)
        return targets

    def _decide(self, observed: FleetObservation) -> tuple[ReplicaTarget, ...]:
        pools = observed.pools
        horizon_s = max((pool.cold_start_s for pool in pools if pool.maximum), default=0.0)
        coming, maximum = self._demand.saw(observed, horizon_s)
        overdue = self._overdue.saw(observed)
        if self._idle.saw(observed) >= self._idle_s:
            return _changed_targets(pools, [0] * len(pools), f"no request for {self._idle_s:g} s")
        shares = [self._share(pool, coming) for pool in pools]
        if observed.held and (first := choose_first_pool(_usable_pools(pools, shares), overdue)) is not None:
            return target_change(
                first, 1, f"{observed.held} held: its first replica is ready in {first.cold_start_s:g} s"
            )
        more = self._more(pools, shares, overdue, f"{_format_load(coming)} expected within {horizon_s:g} s")
        if more or coming.requests <= 0 or not self._demand.settled:
            return more
        # Both loads must be served, since more requests with shorter prompts may be the lighter load.
        min_shares = [min(share, self._share(pool, maximum)) for pool, share in zip(pools, shares, strict=True)]
        return self._fewer(
            observed.now, pools, min_shares, overdue, f"at most {_format_load(maximum)} for {self._settle_s:g} s"
        )

    def _share(self, pool: PoolObservation, load: OfferedLoad) -> float:
        """Return the share of the load that one replica serves; infinite if there is no load, even at unknown speed."""
        if load.requests <= 0:
            return math.inf
        return carried_share(pool.speed, self.slo, load) if pool.speed else 0.0

    def _more(
        self, pools: Sequence[PoolObservation], shares: Sequence[float], overdue: frozenset[str], said: str
    ) -> tuple[ReplicaTarget, ...]:
        """Return the cheapest additions if the current and coming replicas are not enough.

        Else what the bounds require.
        """
        counts = [clamp_replicas(pool, pool.target) for pool in pools]
        counted = [_expected_count(pool, overdue, count) for pool, count in zip(pools, counts, strict=True)]
        have = sum(share * count for share, count in zip(shares, counted, strict=True) if count)
        if have >= 1.0 or math.isinf(max(shares, default=0.0)):
            return _changed_targets(pools, counts, "within its bounds")
        classes = [
            ReplicaClass(
                pool.cost_per_hour, share / self._headroom, count, count if pool.name in overdue else pool.maximum
            )
            for pool, share, count in zip(pools, shares, counted, strict=True)
        ]
        added = [max(now, count) for now, count in zip(counts, cheapest_counts(classes, min_replicas=1), strict=True)]
        reason = f"{said}, of which {have:.0%} is provided for: the cheapest that hold {self._objectives()}"
        if added == counts:
            unknown = [
                pool
                for pool in pools
                if pool.speed is None and not pool.target and pool.maximum and pool.name not in overdue
            ]
            if unknown:
                first = min(unknown, key=lambda pool: (pool.cost_per_hour, pool.cold_start_s))
                return target_change(first, 1, f"{said}, and the others do not suffice: its speed is not known yet")
        return _changed_targets(pools, added, reason)

    def _fewer(
        self, now: float, pools: Sequence[PoolObservation], shares: Sequence[float], overdue: frozenset[str], said: str
    ) -> tuple[ReplicaTarget, ...]:
        """Return a cheaper mix that is enough: first its additional replicas, and once these are ready, its cuts."""
        if not any(shares):
            return ()  # no class is known to meet the objectives, so nothing is removed
        have = [_expected_count(pool, overdue, pool.target) for pool in pools]
        classes = [
            ReplicaClass(pool.cost_per_hour, share / self._headroom, *_range(pool, overdue))
            for pool, share in zip(pools, shares, strict=True)
        ]
        best = cheapest_counts(classes, min_replicas=1)
        before, after = _cost(pools, have), _cost(pools, best)
        reason = f"{said}: {after:g} an hour instead of {before:g} hold {self._objectives()}"
        if any(new > old for new, old in zip(best, have, strict=True)):
            worth = after < (1 - _MIN_SAVING) * before
            return (
                _changed_targets(pools, [max(*both) for both in zip(best, have, strict=True)], reason) if worth else ()
            )
        ready = sum(share * min(count, pool.ready) for share, count, pool in zip(shares, best, pools, strict=True))
        if list(best) == have or ready < 1.0 or now < self._lowered_at + self._cooldown_s:
            return ()
        self._lowered_at = now
        counts = [pool.target if new == old else new for pool, new, old in zip(pools, best, have, strict=True)]
        return _changed_targets(pools, counts, reason)

    def _objectives(self) -> str:
        return f"TTFT {self.slo.ttft_s:g} s and TPOT {self.slo.tpot_s:g} s"


def _usable_pools(pools: Sequence[PoolObservation], shares: Sequence[float]) -> Sequence[PoolObservation]:
    """Return the pools that have replicas or may meet the objectives; all pools if none may."""
    may = [share > 0 or pool.speed is None for pool, share in zip(pools, shares, strict=True)]
    return [pool for pool, good in zip(pools, may, strict=True) if good or pool.target or not any(may)]


def _expected_count(pool: PoolObservation, overdue: frozenset[str], count: int) -> int:
    return min(count, pool.ready) if pool.name in overdue else count


def _range(pool: PoolObservation, overdue: frozenset[str]) -> tuple[int, int]:
    """Return the bounds of a pool for a cheaper mix.

    A class of unknown speed keeps what it has; a class whose replicas do not come gets no more.
    """
    if pool.speed is None:
        return pool.target, pool.target
    maximum = min(pool.maximum, pool.ready) if pool.name in overdue else pool.maximum
    return min(pool.minimum, maximum), maximum


def _cost(pools: Sequence[PoolObservation], counts: Sequence[int]) -> float:
    return sum(pool.cost_per_hour * count for pool, count in zip(pools, counts, strict=True))


def _changed_targets(pools: Sequence[PoolObservation], counts: Sequence[int], reason: str) -> tuple[ReplicaTarget, ...]:
    return tuple(
        target for pool, count in zip(pools, counts, strict=True) for target in target_change(pool, count, reason)
    )


def _format_load(load: OfferedLoad) -> str:
    return f"{load.requests:.3g} requests/s of {load.prompt:.0f} + {load.output:.0f} tokens"
