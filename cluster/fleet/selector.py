"""From what a pool asks for to what Ray places by: resources, and labels of nodes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from .capability import capabilities_of
from .spec import BundleSpec, PoolSpec

__all__ = ["ACCELERATOR", "COMPUTE_CAPABILITY", "node_labels", "placement_options"]

ACCELERATOR = "ray.io/accelerator-type"  # Ray sets it: T4, A10, H100
COMPUTE_CAPABILITY = "motley/compute-capability"  # whoever starts the node sets it: 7.5

DRIVER_S = 20.0  # a driver that has to wake its GPUs takes seconds


def placement_options(pool: PoolSpec) -> dict[str, Any]:
    """Of each replica of the pool, as options of its deployment.

    A GPU is Ray's to give, unless the pool names it by its number: then nobody else is to use it.
    """
    selector = dict(pool.labels)
    if pool.accelerator is not None:
        selector[ACCELERATOR] = pool.accelerator
    if pool.compute_capability is not None:
        selector[COMPUTE_CAPABILITY] = one_of(capabilities_of(pool.compute_capability))
    if pool.bundles is not None:
        return _of_bundles(pool.bundles, pool.strategy or "STRICT_PACK", selector, gpus=pool.where == "cuda")
    options = {
        "num_cpus": pool.booked_cpus,
        **({"num_gpus": pool.processes} if pool.where == "cuda" else {}),
        **({"resources": dict(pool.resources)} if pool.resources else {}),
        **({"label_selector": selector} if selector else {}),
    }
    return {"ray_actor_options": options}


def _of_bundles(
    bundles: Sequence[BundleSpec], strategy: str, selector: dict[str, str], *, gpus: bool
) -> dict[str, Any]:
    """The replica's actor is in the first, and takes all of it. gpus: there is one in each."""
    first, selectors = bundles[0], [{**selector, **bundle.labels} for bundle in bundles]
    gpu = {"GPU": 1} if gpus else {}
    return {
        "ray_actor_options": {
            "num_cpus": first.cpus,
            **({"num_gpus": 1} if gpus else {}),
            **({"resources": dict(first.resources)} if first.resources else {}),
        },
        "placement_group_bundles": [{"CPU": bundle.cpus, **gpu, **bundle.resources} for bundle in bundles],
        "placement_group_strategy": strategy,
        **({"placement_group_bundle_label_selector": selectors} if any(selectors) else {}),
    }  # fmt: skip


def one_of(values: list[str]) -> str:
    """In Ray's syntax, which compares nothing by size."""
    return values[0] if len(values) == 1 else f"in({', '.join(values)})"


def node_labels() -> dict[str, str]:
    """For a node on this machine: its GPUs' compute capability, where they have one and the same."""
    found = set(_capabilities_here())
    return {COMPUTE_CAPABILITY: found.pop()} if len(found) == 1 else {}


def _capabilities_here() -> list[str]:
    """By the driver's own tool; none without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DRIVER_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in ended.stdout.splitlines() if line.strip()] if ended.returncode == 0 else []
