"""Control plane: records what was decided, and brings the fleet there step by step.

Every decision is recorded before it is carried out, and every action may be repeated. So a control plane that is killed
continues where it was, and nothing is decided twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from .....replicas.errors import InvalidRequest, MotleyError, NotFound
from .....replicas.short_repr import short_repr
from ....one_shot_event import OneShotEvent, create_event, set_event
from ....routing.explanation.route_explanation import FoundRoutes
from ....routing.fleet_status import FleetStatus, PrefixStatus, WeightStatus
from ...scaling.arrival_rates import ArrivalRates
from ...scaling.scaling_policy import ReplicaTarget
from ..backend.fleet_backend import FleetBackend, PoolSnapshot, pool_of_replica
from ..state import decisions
from ..state.control_state import ControlState, FleetEvent, PolicyPlan
from .cold_starts import ColdStartTimes
from .fleet_observation import order_to_remove, replicas_by_pool, start_failure
from .policy_runner import PolicyRunner
from .policy_selection import make_policy
from .weight_updater import WeightUpdater

log = logging.getLogger(__name__)

STEP_S = 0.5  # interval of the control loop
IDLE_S = 0.3  # a load this long after a replica was marked includes all requests that were under way to it
POLICY_ACTOR_PREFIX = "policy "  # prefix of the author of a policy's decisions, before its name
ANOTHER = ("policy", "deployed")  # kinds of events that may have changed the policy
Clock = Callable[[], float]


class StateStore(Protocol):
    async def keep(self, state: ControlState) -> None:
        """Keep the state. Raises Unavailable if that fails."""
        ...


class FleetReconciler:
    """Control loop of a fleet: decisions come from gRPC calls and the scaling policy, and `step` carries them out.

    snapshots      latest state of the pools from Serve
    status         latest status from the ingress; None: not yet known
    pending        why each pool has fewer replicas than it wants
    policy_failed  why the policy decides nothing, or not for all pools; empty: it works
    changed        event that is set, and replaced by a new one, whenever there is something new to see
    observed_s     monotonic time at which the fleet was last observed; 0: it has not been

    Recorded times come from `clock` in Unix seconds. Durations are measured by `monotonic`, which nobody can set, so
    that replicas do not seem idle, late or slow to start when somebody sets the clock.
    """

    def __init__(
        self,
        fleet: FleetBackend,
        store: StateStore,
        state: ControlState,
        clock: Clock = time.time,
        monotonic: Clock = time.monotonic,
    ) -> None:
        self.state = state
        self.snapshots: Mapping[str, PoolSnapshot] = {}
        self.status: FleetStatus | None = None
        self.pending: dict[str, str] = {}
        self.policy_failed = ""
        self.changed: OneShotEvent = create_event()
        self.observed_s = 0.0
        self._fleet = fleet
        self._store = store
        self._clock = clock
        self._monotonic = monotonic
        self._lock = asyncio.Lock()
        self.updating = WeightUpdater(fleet, self)
        self._policy_runner = PolicyRunner()
        self._starts = ColdStartTimes()
        self._marked: dict[str, float] = {}  # replica -> monotonic time of its mark by this process

    @property
    def rates(self) -> ArrivalRates:
        """Rates of requests and tokens that came to the fleet between the last two looks."""
        return self._policy_runner.rates

    @property
    def cold_start_s(self) -> Mapping[str, float]:
        """Start times in seconds of the pools where a start has been observed."""
        return self._starts.cold_start_s

    async def run(self) -> None:
        """Run `step` forever. A step that fails is logged and tried again."""
        while True:
            try:
                await self.step()
            except MotleyError as error:
                log.warning("the state of the fleet could not be read: %s", error.message)
            except Exception:  # a bug of ours or of a policy must not end scaling
                log.exception("the state of the fleet could not be read")
            await asyncio.sleep(STEP_S)

    # Decisions

    async def scale(self, pool: str, replicas: int, **how: Any) -> FleetEvent | None:
        """Set a pool's target (see `decisions.scale`) and return the event; None if nothing changed.

        Raises MotleyError.
        """
        return await self._decide(partial(decisions.scale, pool=pool, replicas=replicas, **how))

    async def set_policy(
        self, policy: PolicyPlan | None, bounds: list[tuple[str, int, int]], **how: Any
    ) -> FleetEvent | None:
        if policy is not None:
            make_policy(policy)  # raises if it cannot be built
        return await self._decide(partial(decisions.set_policy, policy=policy, bounds=bounds, **how))

    async def drain(self, replica_id: str, **how: Any) -> FleetEvent | None:
        snapshots = await self._fleet.snapshots()
        pool = pool_of_replica(snapshots, replica_id)
        if pool is None or pool not in self.state.pools:
            raise NotFound(
                f"replica_id: there is no {short_repr(replica_id)} that serves",
                param="replica_id",
                code="replica_not_found",
            )
        return await self._decide(partial(decisions.drain, replica_id=replica_id, pool=pool, **how))

    async def roll(self, pool: str, model: str, version: str, **how: Any) -> FleetEvent | None:
        decisions.find_pool_plan(self.state, pool)
        if model:
            await self._fleet.check_model(model)
        return await self._decide(partial(decisions.roll, pool=pool, model=model, version=version, **how))

    async def update_weights(
        self, path: str, *, delta: bool, pool: str, expected: int | None, by: str, reason: str
    ) -> tuple[str, Sequence[WeightStatus]]:
        """Update a pool's weights; return the pool's name and what became of each replica.

        Raises MotleyError if no replica has new weights. Once the update is recorded it goes on whatever becomes of the
        caller (see weight_updater.py).
        """
        return await self.updating.update(path, delta=delta, pool=pool, expected=expected, by=by, reason=reason)

    async def _decide(self, decision: Callable[..., ControlState]) -> FleetEvent | None:
        """Apply a decision and return its last event; None if nothing changed."""
        events = await self.change(decision)
        return events[-1] if events else None

    async def change(self, change: Callable[[ControlState, float], ControlState]) -> list[FleetEvent]:
        """Store the state that `change` returns, then make it the current one; return the new events."""
        async with self._lock:
            old, new = self.state, change(self.state, self._clock())
            if new == old:
                return []
            await self._store.keep(new)
            self.state = new
        events = [event for event in new.events if event.sequence > old.sequence]
        for event in events:
            log.info("%s", event.line)
        self._notify()
        return events

    def _notify(self) -> None:
        changed, self.changed = self.changed, create_event()
        set_event(changed)

    # How decisions are carried out

    async def step(self) -> None:
        """Look at the fleet once, and take the next actions towards what was decided."""
        await self._take_over()
        snapshots = await self._fleet.snapshots()
        status = await self._fleet.status(start_failure(self.state, snapshots))
        now = self._monotonic()
        if status is not None:
            self._policy_runner.saw(now, status)
        self._starts.saw(now, snapshots)
        await self._let_go(snapshots, status)
        await self._drain(snapshots, status, now)
        await self._roll(snapshots)
        await self._set_targets(snapshots)
        await self._run_policy(snapshots, status, now)
        self.updating.step(status, now)
        await self._record_progress(snapshots)
        self.observed_s = now
        if (snapshots, status) != (self.snapshots, self.status):
            self.snapshots, self.status = snapshots, status
            self._notify()

    async def _take_over(self) -> None:
        """Take over the bounds and policy of the latest deployment, once."""
        planned = await self._fleet.planned()
        if planned is not None and planned.name != self.state.deployment:
            name, pools, policy = planned.name, planned.pools, planned.policy
            await self.change(partial(decisions.take_over_deployment, deployment=name, pools=pools, policy=policy))

    async def _let_go(self, snapshots: Mapping[str, PoolSnapshot], status: FleetStatus | None) -> None:
        """Mark the replicas that leave where fewer are wanted. Serve removes any that cannot be marked as it likes."""
        for pool in self.state.pools.keys() & snapshots.keys() - self.state.rolls.keys():
            running = order_to_remove(snapshots[pool], replicas_by_pool(status).get(pool, []))
            marked = [name for name in decisions.choose_leaving(self.state, pool, running) if await self._mark(name)]
            until = self._clock() + decisions.DRAIN_S
            await self.change(
                partial(decisions.start_leaving, pool=pool, gone=marked, num_running=len(running), until=until)
            )

    async def _drain(self, snapshots: Mapping[str, PoolSnapshot], status: FleetStatus | None, now: float) -> None:
        """Advance each drain: mark the replica, end it once idle or out of time, and finish once Serve has noticed."""
        running = {one.replica_id for pool in snapshots.values() for one in pool.running}
        for replica_id, one in self.state.drains.items():
            if replica_id not in running:
                await self._forget(replica_id, "" if one.ended else "it was gone already")
            elif not one.ended and (self._clock() >= one.until or await self._is_idle(replica_id, status, now)):
                await self._fleet.end(replica_id)
                await self.change(partial(_note_ended, replica_id=replica_id))

    async def prefixes(self) -> Sequence[PrefixStatus]:
        """Return the prefix cache statistics of the replicas. Raises Unavailable."""
        return await self._fleet.prefixes()

    async def explain(self, request: str) -> FoundRoutes:
        """Return where the latest requests of that id went, and why. Raises Unavailable."""
        return await self._fleet.explain(request)

    async def flush(self, tenant: str | None) -> int:
        """Drop the cached prefixes of one tenant, or of all (None); return on how many replicas. Raises Unavailable."""
        return await self._fleet.flush(tenant)

    async def _mark(self, replica_id: str) -> bool:
        """Make a replica refuse new requests; return whether it does.

        One call is enough for an ingress. It may have been replaced by one that does not know the mark, and is then
        told again.
        """
        statuses = {one.replica_id: one.state for one in (self.status.replicas if self.status else ())}
        if replica_id in self._marked and statuses.get(replica_id, "draining") == "draining":
            return True
        if await self._fleet.mark(replica_id):
            self._marked[replica_id] = self._monotonic()
            return True
        return False

    async def _is_idle(self, replica_id: str, status: FleetStatus | None, now: float) -> bool:
        """Return whether a replica is marked and a load reported after the mark says that it has no requests."""
        if not await self._mark(replica_id):
            return False
        marked = self._marked[replica_id] + IDLE_S
        own = [one for one in (status.replicas if status else ()) if one.replica_id == replica_id]
        return now > marked and all(now - one.age_s > marked and not one.load.running + one.load.waiting for one in own)

    async def _forget(self, replica_id: str, reason: str) -> None:
        self._marked.pop(replica_id, None)
        await self.change(partial(_note_drained, replica_id=replica_id, reason=reason))

    async def _roll(self, snapshots: Mapping[str, PoolSnapshot]) -> None:
        """Advance each roll: deploy the new version once, go back if it does not start, and finish when all have it."""
        versions: dict[str, str] = {}
        models = {name: plan.model for name, plan in self.state.pools.items()}
        for pool, one in self.state.rolls.items():
            snapshot = snapshots.get(pool)
            version = one.before if one.failed else one.version
            if snapshot is None:
                continue
            if snapshot.version != version:
                versions[pool] = version
            elif one.failed:
                await self.change(partial(_note_rolled, pool=pool))
            elif snapshot.state == "failed":
                await self.change(
                    partial(_note_roll_deployed, pool=pool, failed=snapshot.message or "its replicas do not start")
                )
            elif snapshot.state == "healthy":
                await self.change(partial(_note_rolled, pool=pool))
            if not one.failed:
                models[pool] = one.model
            if not one.before:
                await self.change(partial(_note_roll_deployed, pool=pool, before=snapshot.version))
        if versions:
            given = {name: model for name, model in models.items() if model}
            await self._fleet.redeploy(self._targets(snapshots), versions, given)

    def _targets(self, snapshots: Mapping[str, PoolSnapshot]) -> dict[str, int]:
        """Return the number of replicas that Serve is to aim for, which includes those that still drain."""
        state = self.state
        return {name: plan.target + state.leaving(name) for name, plan in state.pools.items() if name in snapshots}

    async def _set_targets(self, snapshots: Mapping[str, PoolSnapshot]) -> None:
        for pool, replicas in self._targets(snapshots).items():
            if snapshots[pool].target != replicas:
                log.info(
                    "pool %s: Serve aims at %d replicas, and is now told to aim at %d",
                    pool,
                    snapshots[pool].target,
                    replicas,
                )
                await self._fleet.set_target(pool, replicas)

    async def _run_policy(self, snapshots: Mapping[str, PoolSnapshot], status: FleetStatus | None, now: float) -> None:
        for target in self._policy_runner.decide(now, self.state, snapshots, status, self.cold_start_s):
            try:
                await self._follow(target)
            except (InvalidRequest, NotFound) as error:  # the policy's targets of other pools still count
                self._policy_runner.failed = f"{target.pool}: {error.message}"
        if self._policy_runner.failed != self.policy_failed:
            await self.change(partial(_note_policy_failed, reason=self._policy_runner.failed))
            self.policy_failed = self._policy_runner.failed
            self._notify()

    async def _follow(self, target: ReplicaTarget) -> None:
        plan = decisions.find_pool_plan(self.state, target.pool)
        replicas = min(max(target.replicas, plan.minimum), plan.maximum)
        by, reason = f"{POLICY_ACTOR_PREFIX}{self.state.policy.name}", target.reason[: decisions.MAX_REASON]
        await self.scale(target.pool, replicas, by=by, reason=reason, allow_zero=True)

    async def _record_progress(self, snapshots: Mapping[str, PoolSnapshot]) -> None:
        for pool in sorted(self.state.pools.keys() & snapshots.keys()):
            plan = self.state.pools[pool]
            serving = [one for one in snapshots[pool].running if one.replica_id not in self.state.drains]
            if len(serving) == plan.target and not self.state.leaving(pool) and not snapshots[pool].starting:
                self.pending.pop(pool, None)
                await self.change(partial(_note_settled, pool=pool))
            elif len(serving) < plan.target:
                why = await self._fleet.pending(pool)
                if why != self.pending.get(pool):
                    self.pending[pool] = why
                    await self.change(partial(_note_pending, pool=pool, reason=why))


# What is recorded of each step


def _note_ended(state: ControlState, now: float, replica_id: str) -> ControlState:
    drains = dict(state.drains)
    if replica_id in drains:
        drains[replica_id] = replace(drains[replica_id], ended=True)
    return replace(state, drains=drains)


def _note_drained(state: ControlState, now: float, replica_id: str, reason: str) -> ControlState:
    if replica_id not in state.drains:
        return state
    drains = dict(state.drains)
    one = drains.pop(replica_id)
    return replace(state, drains=drains).with_event(now, "drained", pool=one.pool, replica_id=replica_id, reason=reason)


def _note_roll_deployed(state: ControlState, now: float, pool: str, **what: str) -> ControlState:
    if pool not in state.rolls:
        return state
    return replace(state, rolls={**state.rolls, pool: replace(state.rolls[pool], **what)})


def _note_rolled(state: ControlState, now: float, pool: str) -> ControlState:
    rolls = dict(state.rolls)
    one = rolls.pop(pool)
    pools = dict(state.pools)
    if not one.failed:
        same = one.model == pools[pool].model
        pools[pool] = replace(pools[pool], model=one.model, weights=pools[pool].weights if same else ())
    kind = "roll_failed" if one.failed else "rolled"
    return replace(state, rolls=rolls, pools=pools).with_event(now, kind, pool=pool, reason=one.failed)


def _note_settled(state: ControlState, now: float, pool: str) -> ControlState:
    if pool in state.settled:
        return state
    after = replace(state, settled=state.settled | {pool})
    target = state.pools[pool].target
    return after.with_event(now, "settled", pool=pool, before=target, after=target)


def _note_pending(state: ControlState, now: float, pool: str, reason: str) -> ControlState:
    """Record why a pool has too few replicas, unless that was the last event, even one of an earlier process."""
    last = next(
        (one for one in reversed(state.events) if one.pool == pool and one.kind in ("pending", "settled")), None
    )
    settled = state.settled - {pool}
    if last is not None and (last.kind, last.reason) == ("pending", reason):
        return replace(state, settled=settled)
    return replace(state, settled=settled).with_event(now, "pending", pool=pool, reason=reason)


def _note_policy_failed(state: ControlState, now: float, reason: str) -> ControlState:
    """Record that the policy fails, once until it decides something or the policy changes."""
    its = (one for one in reversed(state.events) if one.kind in ANOTHER or one.by.startswith(POLICY_ACTOR_PREFIX))
    last = next(its, None)
    if not reason or (last is not None and last.kind == "policy_failed"):
        return state
    by = f"{POLICY_ACTOR_PREFIX}{state.policy.name}"
    return state.with_event(now, "policy_failed", by=by, reason=reason[: decisions.MAX_REASON])
