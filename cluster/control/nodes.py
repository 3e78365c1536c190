"""The nodes of the Ray cluster that this process is of."""

from __future__ import annotations

import ray

from .pending import Node

__all__ = ["living_nodes"]


def living_nodes() -> list[Node]:
    """With their labels, and what they have in all and free now."""
    free = ray._private.state.available_resources_per_node()
    return [
        Node(node.get("Labels") or {}, node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
