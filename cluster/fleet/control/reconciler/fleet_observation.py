"""Observations of the fleet, combined from Serve and the ingress, for policies and for which replica leaves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from .....replicas.types import ReplicaProfile
from ....routing.fleet_status import DemandCounters, FleetStatus, ReplicaStatus
from ....routing.prediction.latency_model import ReplicaSpeed
from ....routing.prediction.replica_speeds import profile_speed as routed
from ...scaling.arrival_rates import ArrivalCounts, ArrivalRates
from ...scaling.scaling_policy import FleetObservation, PoolObservation
from ..backend.fleet_backend import PoolSnapshot, ReplicaSnapshot
from ..state.control_state import ControlState


def count_arrivals(
    before: tuple[float, DemandCounters] | None, now: float, demand: DemandCounters, cached_tokens: int = 0
) -> ArrivalCounts:
    """Return the arrivals since `before`; `cached_tokens` counts the same time.

    An ingress that has restarted counts from 0 again: then its whole counts are the arrivals.
    """
    if before is None or now <= before[0]:
        return ArrivalCounts()
    then, old = before
    if any(getattr(demand, one.name) < getattr(old, one.name) for one in fields(DemandCounters) if one.name != "held"):
        old = DemandCounters()
    return ArrivalCounts(
        demand.requests - old.requests,
        demand.prompt_tokens - old.prompt_tokens,
        demand.output_tokens - old.output_tokens,
        cached_tokens,
        now - then,
    )


def observe_fleet(
    now: float,
    state: ControlState,
    snapshots: Mapping[str, PoolSnapshot],
    status: FleetStatus | None,
    of: ArrivalRates,
    cold_start_s: Mapping[str, float],
    speeds: Mapping[str, ReplicaSpeed],
) -> FleetObservation:
    """Return the observation that a scaling policy decides on. Pools that Serve does not have yet are left out.

    of            rates of requests and tokens
    cold_start_s  observed start times by pool
    speeds        speeds of the pools that have had a replica
    """
    by_pool = replicas_by_pool(status)
    pools = tuple(
        _observe_pool(name, state, snapshots[name], by_pool.get(name, ()), speeds.get(name), cold_start_s)
        for name in sorted(state.pools)
        if name in snapshots
    )
    num_held = 0 if status is None else status.demand.held
    return FleetObservation(now, pools, of.requests, of.prompt_tokens, of.output_tokens, num_held, of.cached_tokens)


def replicas_by_pool(status: FleetStatus | None) -> dict[str, list[ReplicaStatus]]:
    """Return the replicas of a status by pool."""
    found: dict[str, list[ReplicaStatus]] = {}
    for one in () if status is None else status.replicas:
        found.setdefault(one.pool, []).append(one)
    return found


def start_failure(state: ControlState, snapshots: Mapping[str, PoolSnapshot]) -> str:
    """Return why there is no replica although some are wanted.

    Empty while any replica serves or may still start, or while none is wanted.
    """
    needed = {name: snapshots[name] for name, plan in state.pools.items() if plan.target and name in snapshots}
    if any(pool.running or not pool.failing for pool in needed.values()):
        return ""
    return "; ".join(f"{name}: {pool.failing}" for name, pool in sorted(needed.items()))


def order_to_remove(snapshot: PoolSnapshot, statuses: Sequence[ReplicaStatus]) -> list[str]:
    """Return the serving replicas in the order in which they should leave.

    Replicas that drain already come first, then those with the fewest requests, then the newest.
    """
    by_replica = {one.replica_id: one for one in statuses}

    def rank(one: ReplicaSnapshot) -> tuple[bool, int, float]:
        own = by_replica.get(one.replica_id)
        work = 0 if own is None else own.load.running + own.load.waiting
        return (own is None or own.state != "draining", work, -one.started)

    return [one.replica_id for one in sorted(snapshot.running, key=rank)]


def count_cached_tokens(before: Mapping[str, int], status: FleetStatus) -> int:
    """Return the prompt tokens found in caches since `before` (a result of `cached_tokens_by_replica`), by replicas
    that existed then.
    """
    return sum(max(0, now - before[name]) for name, now in cached_tokens_by_replica(status).items() if name in before)


def cached_tokens_by_replica(status: FleetStatus) -> dict[str, int]:
    return {one.replica_id: one.load.cached_tokens for one in status.replicas}


def speeds_by_pool(status: FleetStatus) -> dict[str, ReplicaSpeed]:
    """Return the speed of each pool's first ready replica: its profile, corrected by what was observed."""
    return {one.pool: corrected_speed(one.profile, one) for one in reversed(status.replicas) if one.state == "ready"}


def _observe_pool(
    name: str,
    state: ControlState,
    snapshot: PoolSnapshot,
    replicas: Sequence[ReplicaStatus],
    speed: ReplicaSpeed | None,
    cold_start_s: Mapping[str, float],
) -> PoolObservation:
    plan = state.pools[name]
    serving = [one for one in snapshot.running if one.replica_id not in state.drains]
    return PoolObservation(
        name=name,
        minimum=plan.minimum,
        maximum=plan.maximum,
        target=plan.target,
        ready=len(serving),
        starting=snapshot.starting,
        speed=speed,
        cost_per_hour=plan.cost_per_hour,
        cold_start_s=cold_start_s.get(name, plan.cold_start_s),
        queued_tokens=sum(one.load.queued_prefill_tokens for one in replicas),
        running=sum(one.load.running for one in replicas),
        waiting=sum(one.load.waiting for one in replicas),
        placeable=snapshot.placeable,
    )


def corrected_speed(profile: ReplicaProfile, status: ReplicaStatus) -> ReplicaSpeed:
    """Return the speed of a replica: that of its profile, corrected by what was observed."""
    speed = routed(profile)
    return replace(
        speed,
        prefill_tokens_per_s=speed.prefill_tokens_per_s / status.ttft_off,
        decode_s=tuple(step_s * status.tpot_off for step_s in speed.decode_s),
        context_s=speed.context_s * status.tpot_off,
    )
