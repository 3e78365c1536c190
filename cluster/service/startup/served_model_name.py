"""Name by which a fleet's model is served: never the name of a model that it is not."""

from __future__ import annotations

from ...fleet.spec.fleet_file_loader import DEMO
from ...fleet.spec.fleet_spec import FleetSpec

DEMO_NAME = "motley-demo"
NULL_NAME = "null-engine"
SIMULATED_NAME = "simulated"


def with_served_model_name(spec: FleetSpec, *, null: bool = False) -> FleetSpec:
    """Return the spec with the demo model's folder filled in, and a name if none was given."""
    name = spec.served_model_name
    if null:
        name = name or NULL_NAME
    elif any(pool.simulate is not None for pool in spec.pools):
        name = name or SIMULATED_NAME
    if spec.model == DEMO:
        from ....replicas.demo import demo_path

        return spec.model_copy(update={"model": str(demo_path()), "served_model_name": name or DEMO_NAME})
    return spec.model_copy(update={"served_model_name": name})
