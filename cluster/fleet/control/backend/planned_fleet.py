"""Conversion of the bounds and the policy of a fleet file or of flags to what the control plane takes over."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

from ...spec.fleet_spec import FleetSpec
from ..state.control_state import PolicyPlan, PoolPlan
from .fleet_backend import PlannedFleet


def plan_from_spec(spec: FleetSpec) -> PlannedFleet:
    pools = {
        pool.name: PoolPlan(
            target=max(pool.replicas.start, pool.replicas.min),
            minimum=pool.replicas.min,
            maximum=pool.replicas.max,
            cost_per_hour=pool.cost_per_hour,
            cold_start_s=pool.cold_start_s,
            said=pool.quantization.model or "",
        )
        for pool in spec.pools
    }
    policy = PolicyPlan(spec.scaling.policy, settings=spec.scaling.settings)
    if spec.slo is not None:
        policy = replace(policy, ttft_s=spec.slo.ttft_ms / 1e3, tpot_s=spec.slo.tpot_ms / 1e3)
    said = json.dumps([{name: asdict(plan) for name, plan in sorted(pools.items())}, asdict(policy)])
    return PlannedFleet(hashlib.sha256(said.encode()).hexdigest()[:16], pools, policy)
