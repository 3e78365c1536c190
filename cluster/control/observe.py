"""Observations of the fleet, combined from Serve and the ingress, for policies and for which replica leaves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from ...replicas.types import ReplicaProfile
from ..fleet.status import Demand, FleetStatus, ReplicaStatus
from ..routing.predict import Speed
from ..routing.speeds import speed_of as routed
from ..scaling.arrivals import Arrivals, Rates
from ..scaling.state import Observed, PoolState
from .fleet import PoolLook, ReplicaLook
from .state import State


def arrived(before: tuple[float, Demand] | None, now: float, demand: Demand, cached_tokens: int = 0) -> Arrivals:
    """Return the arrivals since `before`; `cached_tokens` counts the same time.

    An ingress that has restarted counts from 0 again: then its whole counts are the arrivals.
    """
    if before is None or now <= before[0]:
        return Arrivals()
    then, old = before
    if any(getattr(demand, one.name) < getattr(old, one.name) for one in fields(Demand) if one.name != "held"):
        old = Demand()
    return Arrivals(
        demand.requests - old.requests,
        demand.prompt_tokens - old.prompt_tokens,
        demand.output_tokens - old.output_tokens,
        cached_tokens,
        now - then,
    )


def observed(
    now: float,
    state: State,
    look: Mapping[str, PoolLook],
    status: FleetStatus | None,
    of: Rates,
    cold_start_s: Mapping[str, float],
    speeds: Mapping[str, Speed],
) -> Observed:
    """Return the observation that a scaling policy decides on. Pools that Serve does not have yet are left out.

    of            rates of requests and tokens
    cold_start_s  observed start times by pool
    speeds        speeds of the pools that have had a replica
    """
    by_pool = replicas_of(status)
    pools = tuple(
        _pool(name, state, look[name], by_pool.get(name, ()), speeds.get(name), cold_start_s)
        for name in sorted(state.pools)
        if name in look
    )
    held = 0 if status is None else status.demand.held
    return Observed(now, pools, of.requests, of.prompt_tokens, of.output_tokens, held, of.cached_tokens)


def replicas_of(status: FleetStatus | None) -> dict[str, list[ReplicaStatus]]:
    """Return the replicas of a status by pool."""
    found: dict[str, list[ReplicaStatus]] = {}
    for one in () if status is None else status.replicas:
        found.setdefault(one.pool, []).append(one)
    return found


def why_none_starts(state: State, look: Mapping[str, PoolLook]) -> str:
    """Return why there is no replica although some are wanted.

    Empty while any replica serves or may still start, or while none is wanted.
    """
    wanted = {name: look[name] for name, plan in state.pools.items() if plan.target and name in look}
    if any(pool.running or not pool.failing for pool in wanted.values()):
        return ""
    return "; ".join(f"{name}: {pool.failing}" for name, pool in sorted(wanted.items()))


def in_order(look: PoolLook, known: Sequence[ReplicaStatus]) -> list[str]:
    """Return the serving replicas in the order in which they should leave.

    Replicas that drain already come first, then those with the fewest requests, then the newest.
    """
    status = {one.replica_id: one for one in known}

    def rank(one: ReplicaLook) -> tuple[bool, int, float]:
        told = status.get(one.replica_id)
        work = 0 if told is None else told.load.running + told.load.waiting
        return (told is None or told.state != "draining", work, -one.started)

    return [one.replica_id for one in sorted(look.running, key=rank)]


def cached(before: Mapping[str, int], status: FleetStatus) -> int:
    """Return the prompt tokens found in caches since `before` (a result of `caches`), by replicas that existed then."""
    return sum(max(0, now - before[name]) for name, now in caches(status).items() if name in before)


def caches(status: FleetStatus) -> dict[str, int]:
    return {one.replica_id: one.load.cached_tokens for one in status.replicas}


def speeds(status: FleetStatus) -> dict[str, Speed]:
    """Return the speed of each pool that has a ready replica."""
    return {one.pool: speed_of(one.profile, one) for one in reversed(status.replicas) if one.state == "ready"}


def _pool(
    name: str,
    state: State,
    look: PoolLook,
    replicas: Sequence[ReplicaStatus],
    speed: Speed | None,
    cold_start_s: Mapping[str, float],
) -> PoolState:
    plan = state.pools[name]
    serving = [one for one in look.running if one.replica_id not in state.drains]
    return PoolState(
        name=name,
        minimum=plan.minimum,
        maximum=plan.maximum,
        target=plan.target,
        ready=len(serving),
        starting=look.starting,
        speed=speed,
        cost_per_hour=plan.cost_per_hour,
        cold_start_s=cold_start_s.get(name, plan.cold_start_s),
        queued_tokens=sum(one.load.queued_prefill_tokens for one in replicas),
        running=sum(one.load.running for one in replicas),
        waiting=sum(one.load.waiting for one in replicas),
        placeable=look.placeable,
    )


def speed_of(profile: ReplicaProfile, seen: ReplicaStatus) -> Speed:
    """Return the speed of a replica: that of its profile, corrected by what was observed."""
    told = routed(profile)
    return replace(
        told,
        prefill_tokens_per_s=told.prefill_tokens_per_s / seen.ttft_off,
        decode_s=tuple(step_s * seen.tpot_off for step_s in told.decode_s),
        context_s=told.context_s * seen.tpot_off,
    )
