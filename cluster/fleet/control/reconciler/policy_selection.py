"""Construction of the planned scaling policy: `fixed` decides nothing, the others are in cluster/scaling."""

from __future__ import annotations

from .....replicas.errors import InvalidRequest
from ....routing.prediction.latency_model import Slo
from ...scaling.scaling_policy import ScalingPolicy
from ...spec.scaling_spec import ScalingSpec
from ...spec.value_types import MAX_OBJECTIVE_S
from ..state.control_state import FIXED, PolicyPlan


def make_policy(plan: PolicyPlan) -> ScalingPolicy | None:
    """Return the policy, or None if operators decide. Raises InvalidRequest for a wrong name, objective or setting."""
    for name, seconds in (("ttft_s", plan.ttft_s), ("tpot_s", plan.tpot_s)):
        if not 0 < seconds <= MAX_OBJECTIVE_S:
            raise InvalidRequest(
                f"{name}: {seconds:g} is not accepted; expected seconds above 0, up to {MAX_OBJECTIVE_S:g}",
                param=name,
                code="invalid_value",
            )
    for name, value in plan.settings.items():
        bounds = ScalingSpec.bounds(name)
        if bounds is not None and not bounds[0] <= value <= bounds[1]:
            raise InvalidRequest(
                f"{name}: {value:g} is not accepted; expected a number from {bounds[0]:g} to {bounds[1]:g}",
                param=name,
                code="invalid_value",
            )
    if plan.name == FIXED:
        if plan.settings:
            raise InvalidRequest(f"settings: the policy {FIXED} has none", param="settings", code="invalid_value")
        return None
    from ...scaling.policy_registry import create_policy  # imports scipy

    policy: ScalingPolicy = create_policy(plan.name, Slo(plan.ttft_s, plan.tpot_s), **plan.settings)
    return policy
