"""Living nodes of this process's Ray cluster."""

from __future__ import annotations

import ray

from ....ray_compat.cluster_state import free_resources
from .pending_reason import NodeResources


def living_nodes() -> list[NodeResources]:
    """Return the living nodes with their labels, their total resources and what is free of these now."""
    free = free_resources()
    return [
        NodeResources(node.get("Labels") or {}, node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
