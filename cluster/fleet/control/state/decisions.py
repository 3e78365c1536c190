"""Decisions of the control plane: functions from the kept state and a command to the next state. Pure.

A command that is not accepted raises an error and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .....replicas.errors import InvalidRequest, NotFound, Unavailable
from .....replicas.short_repr import short_repr
from ....routing.fleet_status import WeightStatus
from ....service_errors import Conflict, NotConfirmed
from .control_state import (
    AppliedWeightUpdate,
    ControlState,
    OngoingWeightUpdate,
    PolicyPlan,
    PoolPlan,
    PoolRollout,
    ReplicaDrain,
)

MAX_REASON = 200  # characters
MAX_REPLICAS = 10_000  # highest maximum that a pool may be given
DRAIN_S = 600.0
MAX_DRAIN_S = 24 * 3600.0
DEPLOYER = "motley serve"  # author of decisions that come from a fleet file or flags
_UNCHANGED_CODES = ("weights_in_use", "no_room", "engine_busy")  # errors that prove that a replica kept its old weights


def check_generation(state: ControlState, expected: int | None) -> None:
    if expected is not None and expected != state.generation:
        raise Conflict(
            f"generation: it is {state.generation} by now, not {expected}; read the state again before you decide",
            param="generation",
            code="stale_generation",
        )


def check_reason(reason: str, *, needed: bool = True) -> None:
    if needed and not reason.strip():
        raise InvalidRequest("reason: it is missing; say why, in a few words", param="reason", code="invalid_value")
    if len(reason) > MAX_REASON or not reason.isprintable():
        raise InvalidRequest(
            f"reason: expected up to {MAX_REASON} printable characters, not {short_repr(reason)}",
            param="reason",
            code="invalid_value",
        )


def find_pool_plan(state: ControlState, name: str) -> PoolPlan:
    if name not in state.pools:
        there = ", ".join(sorted(state.pools)) or "none"
        raise NotFound(f"pool: there is no {short_repr(name)}; there are: {there}", param="pool", code="pool_not_found")
    return state.pools[name]


def scale(
    state: ControlState,
    now: float,
    pool: str,
    replicas: int,
    *,
    by: str,
    reason: str,
    generation: int | None = None,
    allow_zero: bool = False,
) -> ControlState:
    """Set a pool's target; return the same state if it has that target already. Raises MotleyError."""
    plan = find_pool_plan(state, pool)
    check_generation(state, generation)
    check_reason(reason)
    if not plan.minimum <= replicas <= plan.maximum:
        raise InvalidRequest(
            f"replicas: {replicas} is not accepted; pool {pool!r} may have from {plan.minimum} to {plan.maximum}",
            param="replicas",
            code="invalid_value",
        )
    _check_zero(state, pool, replicas, allow_zero)
    return _with_target(state, now, pool, replicas, by=by, reason=reason)


def set_policy(
    state: ControlState,
    now: float,
    policy: PolicyPlan | None,
    bounds: Sequence[tuple[str, int, int]],
    *,
    by: str,
    reason: str,
    generation: int | None = None,
) -> ControlState:
    """Set another scaling policy (None keeps the present one), other bounds of pools, or both. Raises MotleyError.

    A target outside its new bounds moves to the nearest bound.
    """
    check_generation(state, generation)
    check_reason(reason)
    pools = dict(state.pools)
    for pool, minimum, maximum in bounds:
        plan = find_pool_plan(state, pool)
        if not 0 <= minimum <= maximum <= MAX_REPLICAS:
            raise InvalidRequest(
                f"bounds: {minimum} to {maximum} is not accepted; expected 0 <= minimum <= maximum <= {MAX_REPLICAS}",
                param="bounds",
                code="invalid_value",
            )
        target = min(max(plan.target, minimum), maximum)
        pools[pool] = replace(plan, minimum=minimum, maximum=maximum, target=target)
    changed = replace(state, pools=pools, policy=policy or state.policy)
    if changed == state:
        return state
    after = replace(changed, generation=state.generation + 1)
    for name, _, _ in bounds:
        if pools[name].target != state.pools[name].target:
            after = _note_scaled(after, now, name, state.pools[name].target, by=by, reason="its new bounds")
    changes = [policy.name] if policy is not None and policy != state.policy else []
    changes += [f"{name} from {pools[name].minimum} to {pools[name].maximum}" for name, _, _ in bounds]
    return after.with_event(now, "policy", by=by, reason=": ".join(filter(None, ("; ".join(changes), reason))))


def drain(
    state: ControlState,
    now: float,
    replica_id: str,
    pool: str,
    *,
    remove: bool,
    by: str,
    reason: str,
    timeout_s: float | None = None,
    generation: int | None = None,
    allow_zero: bool = False,
) -> ControlState:
    """Start to drain one replica of `pool`, or change the drain that it is in.

    For a replica that drains already, `remove` and `timeout_s` may still be added: that no other replaces it, or
    another time limit from now on. A replica that was to be removed stays so. Return the same state if nothing changes.
    Raises MotleyError.
    """
    check_generation(state, generation)
    check_reason(reason)
    if timeout_s is not None and not 0 <= timeout_s <= MAX_DRAIN_S:
        raise InvalidRequest(
            f"timeout_s: {timeout_s} is not accepted; expected seconds from 0 to {MAX_DRAIN_S:g}",
            param="timeout_s",
            code="invalid_value",
        )
    plan = find_pool_plan(state, pool)
    old = state.drains.get(replica_id)
    new = old or ReplicaDrain(pool, False, now + DRAIN_S)
    if timeout_s is not None:
        new = replace(new, until=now + timeout_s)
    removed = remove and not new.remove
    new = replace(new, remove=remove or new.remove)
    if new == old:
        return state
    if not removed:
        after = replace(state, generation=state.generation + 1)
    else:
        if plan.target - 1 < plan.minimum:
            raise InvalidRequest(
                f"remove: pool {pool!r} has {plan.target} of at least {plan.minimum}; drain it without remove",
                param="remove",
                code="invalid_value",
            )
        _check_zero(state, pool, plan.target - 1, allow_zero)
        after = _with_target(state, now, pool, plan.target - 1, by=by, reason=reason)
    after = replace(after, drains={**state.drains, replica_id: new})
    return after.with_event(now, "draining", pool=pool, replica_id=replica_id, by=by, reason=reason)


def roll(
    state: ControlState,
    now: float,
    pool: str,
    model: str,
    version: str,
    *,
    by: str,
    reason: str,
    generation: int | None = None,
) -> ControlState:
    """Start to replace all replicas of a pool by ones of the new deployment `version`. Raises MotleyError."""
    plan = find_pool_plan(state, pool)
    check_generation(state, generation)
    check_reason(reason)
    if pool in state.rolls:
        raise Conflict(f"pool {pool!r} is being rolled already", param="pool", code="rolling")
    if pool in state.updates:
        raise Conflict(
            f"pool {pool!r} has an update of weights in progress; try again when it has ended", code="weights_in_use"
        )
    rolls = {**state.rolls, pool: PoolRollout(version, model or plan.model)}
    after = replace(state, rolls=rolls, generation=state.generation + 1)
    why = ": ".join(filter(None, (model, reason)))
    return after.with_event(now, "rolling", pool=pool, by=by, reason=why)


def check_update(state: ControlState, pool: str, expected: int | None, reason: str) -> PoolPlan:
    """Return the pool's plan if its weights may be changed now. Raises MotleyError."""
    plan = find_pool_plan(state, pool)
    check_reason(reason, needed=False)  # its event shows the path anyway
    if pool in state.rolls:
        raise Conflict(f"pool {pool!r} is being rolled; try again when that is done", param="pool", code="rolling")
    if expected is not None and expected != len(plan.weights):
        raise Conflict(
            f"expected_version: the weights of pool {pool!r} are of version {len(plan.weights)} by now, not {expected}",
            param="expected_version",
            code="version_mismatch",
        )
    return plan


def begin_update(
    state: ControlState, now: float, pool: str, one: OngoingWeightUpdate, expected: int | None
) -> ControlState:
    """Return the state with this update in progress, to be stored before any replica is asked for it.

    Raises Conflict if another update or a rollout is in progress or the version is not `expected`, NotFound if there is
    no such pool, and InvalidRequest for a reason that cannot be stored.

    Whatever process ends meanwhile, the record says which weights the replicas may have.
    """
    check_update(state, pool, expected, one.reason)
    if state.updates:
        raise Conflict("another update of weights is in progress; try again when it has ended", code="weights_in_use")
    return replace(state, updates={pool: one})


def updated_weights_digest(results: Sequence[WeightStatus]) -> str | None:
    """Return the digest of the new weights of all replicas that took them; None if it is unknown whether any did.

    Raises the first replica's error if it is certain that none did, Conflict if replicas have different weights, and
    Unavailable if there are none.
    """
    found = sorted({one.weights.contents for one in results if one.weights is not None})
    if not results:
        raise Unavailable("no replica of the pool serves, so none can receive the weights", code="no_replica")
    if len(found) > 1:
        raise Conflict(
            f"the pool's replicas have different weights ({', '.join(found)}); roll it, so that all have the same",
            code="rolling",
        )
    if found:
        return found[0]
    errors = [one.error for one in results if one.error is not None]
    if all(isinstance(error, InvalidRequest) or error.code in _UNCHANGED_CODES for error in errors):
        raise errors[0]
    return None


def finish_update(state: ControlState, now: float, pool: str, one: OngoingWeightUpdate, digest: str) -> ControlState:
    """Record that the pool's replicas have the new weights, with which new replicas begin from now on."""
    if state.updates.get(pool) != one:
        return state
    plan = find_pool_plan(state, pool)
    before = len(plan.weights)
    pools = {
        **state.pools,
        pool: replace(plan, weights=(*plan.weights, AppliedWeightUpdate(one.path, one.delta, digest))),
    }
    after = replace(undo_update(state, now, pool, one), pools=pools, generation=state.generation + 1)
    why = ": ".join(filter(None, (one.path, one.reason)))
    return after.with_event(now, "updated", pool=pool, before=before, after=before + 1, by=one.by, reason=why)


def undo_update(state: ControlState, now: float, pool: str, one: OngoingWeightUpdate) -> ControlState:
    """Withdraw an update that no replica took; the next update gets its version."""
    return replace(
        state, updates={name: other for name, other in state.updates.items() if (name, other) != (pool, one)}
    )


def take_over_deployment(
    state: ControlState, now: float, deployment: str, pools: Mapping[str, PoolPlan], policy: PolicyPlan
) -> ControlState:
    """Take over the pools and the policy of a new deployment. Known pools keep their targets, within the new bounds.

    They also keep the model that they were rolled to, unless the fleet file now names another. This counts as a
    decision unless nothing changes.
    """
    if deployment == state.deployment:
        return state
    old_and_new = {name: (state.pools.get(name, plan), plan) for name, plan in pools.items()}
    plans = {
        name: replace(
            plan,
            target=min(max(old.target, plan.minimum), plan.maximum),
            model=old.model if old.said == plan.said else "",
            weights=old.weights if old.said == plan.said else (),
        )
        for name, (old, plan) in old_and_new.items()
    }
    drains = {name: one for name, one in state.drains.items() if one.pool in plans}
    rolls = {name: one for name, one in state.rolls.items() if name in plans}
    settled = state.settled.intersection(plans)
    updates = {
        name: one
        for name, one in state.updates.items()
        if name in plans and old_and_new[name][0].said == plans[name].said
    }
    after = replace(
        state,
        deployment=deployment,
        pools=plans,
        policy=policy,
        drains=drains,
        rolls=rolls,
        settled=settled,
        updates=updates,
    )
    what = "; ".join(_differences(state, after))
    if not what:
        return after
    after = replace(after, generation=state.generation + 1)
    for name, (old, _) in sorted(old_and_new.items()):
        if plans[name].target != old.target:
            after = _note_scaled(after, now, name, old.target, by=DEPLOYER, reason="its new bounds")
    return after.with_event(
        now, "deployed", by=DEPLOYER, reason=what if len(what) <= MAX_REASON else f"{what[:197]}..."
    )


def _differences(old: ControlState, new: ControlState) -> Iterator[str]:
    """Describe in words how the new state's pools and policy differ from the old ones."""
    if new.policy != old.policy:
        yield f"policy {new.policy.name}"
    for name, plan in sorted(new.pools.items()):
        was = old.pools.get(name)
        bounds = f"{name} from {plan.minimum} to {plan.maximum}"
        if was is None:
            yield f"{bounds}, new"
            continue
        if (plan.minimum, plan.maximum) != (was.minimum, was.maximum):
            yield bounds
        if plan.said != was.said:
            yield f"{name} of {plan.said or 'the model of the fleet'}"
        if plan.cost_per_hour != was.cost_per_hour:
            yield f"{name} at {plan.cost_per_hour:g} an hour"
        if plan.cold_start_s != was.cold_start_s:
            yield f"{name} starts in {plan.cold_start_s:g} s"
    yield from (f"no {name}" for name in sorted(old.pools.keys() - new.pools.keys()))


def choose_leaving(state: ControlState, pool: str, running: Sequence[str]) -> Sequence[str]:
    """Return the replicas that are to leave because more serve than are wanted.

    running  serving replicas, in the order in which they should leave
    """
    surplus = len(running) - state.leaving(pool) - state.pools[pool].target - _count_replaceable(state, pool)
    there = [name for name in running if name not in state.drains]
    return there[: max(0, surplus)]


def start_leaving(
    state: ControlState, now: float, pool: str, gone: Sequence[str], num_running: int, until: float
) -> ControlState:
    """Record that replicas are draining, and leave at the time `until` at the latest.

    Where too many serve, replicas that were to be replaced are removed before others are.
    """
    drains = dict(state.drains)
    surplus = num_running - state.leaving(pool) - state.pools[pool].target
    for name, one in state.drains.items():
        if surplus > 0 and one.pool == pool and not one.remove:
            drains[name] = replace(one, remove=True)
            surplus -= 1
    drains |= {name: ReplicaDrain(pool, True, until) for name in gone if name not in drains}
    return state if drains == state.drains else replace(state, drains=drains)


def _count_replaceable(state: ControlState, pool: str) -> int:
    return sum(not one.remove for one in state.drains.values() if one.pool == pool)


def _with_target(state: ControlState, now: float, pool: str, replicas: int, *, by: str, reason: str) -> ControlState:
    plan = state.pools[pool]
    if replicas == plan.target:
        return state
    pools = {**state.pools, pool: replace(plan, target=replicas)}
    drains = _keep_removed(state, pool, replicas - plan.target)
    after = replace(state, pools=pools, drains=drains, generation=state.generation + 1)
    return _note_scaled(after, now, pool, plan.target, by=by, reason=reason)


def _keep_removed(state: ControlState, pool: str, more: int) -> Mapping[str, ReplicaDrain]:
    """Return the drains after the target grew by `more`: as many replicas that were to be removed are replaced instead.

    They still leave, since a replica's drain mark cannot be taken back.
    """
    drains = dict(state.drains)
    for name, one in state.drains.items():
        if more > 0 and one.pool == pool and one.remove and not one.ended:
            drains[name] = replace(one, remove=False)
            more -= 1
    return drains


def _note_scaled(state: ControlState, now: float, pool: str, before: int, *, by: str, reason: str) -> ControlState:
    state = replace(state, settled=state.settled - {pool})
    return state.with_event(
        now, "scaled", pool=pool, before=before, after=state.pools[pool].target, by=by, reason=reason
    )


def _check_zero(state: ControlState, pool: str, replicas: int, allow_zero: bool) -> None:
    others = any(plan.target for name, plan in state.pools.items() if name != pool)
    if replicas == 0 and state.pools[pool].target > 0 and not others and not allow_zero:
        raise NotConfirmed(
            "allow_zero: no replica would be left; set it if requests are to wait or be refused",
            param="allow_zero",
            code="zero_not_confirmed",
        )
