"""Translation of the control plane's types to the messages of control.proto."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from ....protos import control_pb2 as pb
from ....routing.explanation.route_explanation import FoundRoutes
from ....routing.fleet_status import DemandCounters, PrefixStatus, ReplicaStatus, WeightStatus
from ..backend.fleet_backend import PoolSnapshot, ReplicaSnapshot
from ..reconciler.fleet_observation import replicas_by_pool
from ..reconciler.fleet_reconciler import FleetReconciler
from ..state.control_state import FleetEvent

_STATES = {
    "starting": pb.REPLICA_STATE_STARTING,
    "running": pb.REPLICA_STATE_READY,
    "stopping": pb.REPLICA_STATE_STOPPING,
    "suspect": pb.REPLICA_STATE_SUSPECT,
    "draining": pb.REPLICA_STATE_DRAINING,
}


def fleet_message(plane: FleetReconciler, *, events: bool) -> pb.Fleet:
    state = plane.state
    return pb.Fleet(
        generation=state.generation,
        policy=state.policy.name,
        policy_failed=plane.policy_failed,
        pools=[_pool_message(plane, name) for name in sorted(state.pools)],
        demand=demand_message(plane),
        events=[event_message(one) for one in state.events] if events else (),
    )


def event_message(one: FleetEvent) -> pb.Event:
    fields = {**asdict(one), "kind": pb.EventKind.Value(f"EVENT_KIND_{one.kind.upper()}")}
    return pb.Event(**fields)


def decision_message(plane: FleetReconciler, made: FleetEvent | None) -> pb.Decision:
    return pb.Decision(generation=plane.state.generation, event=None if made is None else event_message(made))


def demand_message(plane: FleetReconciler) -> pb.Demand | None:
    counted: DemandCounters | None = None if plane.status is None else plane.status.demand
    return None if counted is None else pb.Demand(**asdict(counted))


def prefixes_message(found: Iterable[PrefixStatus]) -> pb.Prefixes:
    return pb.Prefixes(
        replicas=[_replica_prefixes_message(one) for one in sorted(found, key=lambda one: (one.pool, one.replica_id))]
    )


def routes_message(found: FoundRoutes) -> pb.ExplainedRoutes:
    return pb.ExplainedRoutes(routes=[pb.ExplainedRoute(**asdict(one)) for one in found.routes], matches=found.matches)


def weights_message(plane: FleetReconciler, pool: str, results: Iterable[WeightStatus]) -> pb.UpdateWeightsReply:
    updates = plane.state.pools[pool].weights
    version = len(updates)
    replicas = [
        pb.ReplicaWeights(
            replica_id=one.replica_id,
            weights_version=version - 1 if one.weights is None else one.weights.version,
            error="" if one.error is None else one.error.message,
        )
        for one in results
    ]
    return pb.UpdateWeightsReply(pool=pool, weights_version=version, contents=updates[-1].contents, replicas=replicas)


def metrics_message(plane: FleetReconciler, pool: str) -> pb.Metrics:
    """Return the metrics of one pool, or of all pools if `pool` is empty."""
    return pb.Metrics(
        pools=[_pool_metrics_message(plane, name) for name in sorted(plane.state.pools) if pool in ("", name)],
        requests_per_s=plane.rates.requests,
        prompt_tokens_per_s=plane.rates.prompt_tokens,
        output_tokens_per_s=plane.rates.output_tokens,
        demand=demand_message(plane),
    )


def _replica_prefixes_message(one: PrefixStatus) -> pb.ReplicaPrefixes:
    message = pb.ReplicaPrefixes(
        replica_id=one.replica_id,
        pool=one.pool,
        prompt_tokens=one.load.prompt_tokens,
        cached_tokens=one.load.cached_tokens,
        shares=one.stats is not None,
    )
    if (stats := one.stats) is not None:
        own, message.bytes_per_s = stats.store, stats.bytes_per_s or 0.0
        for name in ("queried_tokens", "hit_tokens", "value_tokens", "value_bytes"):
            setattr(message, name, getattr(stats, name))
        message.outcomes.update(stats.outcomes)
        for name in ("hits", "misses", "stored", "bytes_read", "bytes_written", "queued"):
            setattr(message.store, name, getattr(own, name))
        message.store.read_s, message.store.write_s = own.read_s / max(own.reads, 1), own.write_s / max(own.writes, 1)
        message.store.breaker = own.breaker.value
        message.store.errors.update(own.errors)
        message.store.dropped.update(own.dropped)
        message.popular.extend(pb.PopularPrefix(**asdict(each)) for each in stats.popular)
    return message


def _pool_message(plane: FleetReconciler, name: str) -> pb.Pool:
    state = plane.state
    plan, snapshot = state.pools[name], plane.snapshots.get(name, PoolSnapshot(0))
    statuses = {one.replica_id: one for one in replicas_by_pool(plane.status).get(name, [])}
    return pb.Pool(
        name=name,
        target=plan.target,
        minimum=plan.minimum,
        maximum=plan.maximum,
        ready=_count_ready(plane, name),
        starting=snapshot.starting,
        draining=sum(one.replica_id in state.drains for one in snapshot.running),
        pending=plane.pending.get(name, ""),
        rolling=name in state.rolls,
        model=plan.model,
        cost_per_hour=plan.cost_per_hour,
        cold_start_s=plane.cold_start_s.get(name, plan.cold_start_s),
        replicas=[_replica_message(plane, one, statuses.get(one.replica_id)) for one in snapshot.replicas],
        weights_version=len(plan.weights),
    )


def _count_ready(plane: FleetReconciler, name: str) -> int:
    snapshot = plane.snapshots.get(name, PoolSnapshot(0))
    return sum(one.replica_id not in plane.state.drains for one in snapshot.running)


def _replica_message(plane: FleetReconciler, snapshot: ReplicaSnapshot, status: ReplicaStatus | None) -> pb.Replica:
    state: str = snapshot.state
    if state == "running":
        draining = snapshot.replica_id in plane.state.drains or (status is not None and status.state == "draining")
        state = "draining" if draining else "suspect" if status is not None and status.state == "suspect" else state
    found = pb.Replica(
        replica_id=snapshot.replica_id, state=_STATES[state], node=snapshot.node, pid=snapshot.pid, load_age_s=-1.0
    )
    if status is not None:
        load = status.load
        found.device = status.profile.device_name
        found.compute_capability = status.profile.compute_capability or ""
        found.running, found.waiting = load.running, load.waiting
        found.queued_prefill_tokens = load.queued_prefill_tokens
        found.kv_used = _used_share(load.kv_blocks_free, load.kv_blocks_total)
        found.generated_tokens_per_s = load.generated_tokens_per_s
        found.load_age_s = status.age_s
        found.weights_version, found.weights_contents = load.weights_version, load.weights_contents
        found.ttft_off, found.tpot_off = status.ttft_off, status.tpot_off
    return found


def _pool_metrics_message(plane: FleetReconciler, name: str) -> pb.PoolMetrics:
    loads = [one.load for one in replicas_by_pool(plane.status).get(name, [])]
    return pb.PoolMetrics(
        pool=name,
        target=plane.state.pools[name].target,
        ready=_count_ready(plane, name),
        starting=plane.snapshots.get(name, PoolSnapshot(0)).starting,
        running=sum(one.running for one in loads),
        waiting=sum(one.waiting for one in loads),
        queued_prefill_tokens=sum(one.queued_prefill_tokens for one in loads),
        kv_used=_used_share(sum(one.kv_blocks_free for one in loads), sum(one.kv_blocks_total for one in loads)),
        generated_tokens_per_s=sum(one.generated_tokens_per_s for one in loads),
    )


def _used_share(free: int, total: int) -> float:
    return 1.0 - free / total if total else 0.0
