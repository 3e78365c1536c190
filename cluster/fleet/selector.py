"""From what a pool asks for to what Ray places by: resources, and labels of nodes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
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
    selector: dict[str, str] = {}
    if pool.accelerator is not None:
        selector[ACCELERATOR] = _tight(pool.accelerator)
    if pool.compute_capability is not None:
        selector[COMPUTE_CAPABILITY] = one_of(capabilities_of(pool.compute_capability))
    if pool.bundles is not None:
        return _of_bundles(pool, pool.bundles, selector)
    selector = {**_all_tight(pool.labels), **selector}
    given = 0 if ":" in pool.where else sum(pool.gpus)
    options = {
        "num_cpus": pool.booked_cpus,
        **({"num_gpus": given} if given else {}),
        **({"resources": dict(pool.resources)} if pool.resources else {}),
        **({"label_selector": selector} if selector else {}),
    }
    return {"ray_actor_options": options}


def _of_bundles(pool: PoolSpec, bundles: Sequence[BundleSpec], selector: dict[str, str]) -> dict[str, Any]:
    """The replica's actor is in the first, and takes all of it. selector: of a node's GPU, for those that have one."""
    first = bundles[0]
    selectors = [
        {**_all_tight(pool.labels), **(selector if gpu else {}), **_all_tight(bundle.labels)}
        for bundle, gpu in zip(bundles, pool.gpus, strict=True)
    ]
    booked = [
        {"CPU": bundle.cpus, **({"GPU": 1} if gpu else {}), **bundle.resources}
        for bundle, gpu in zip(bundles, pool.gpus, strict=True)
    ]
    return {
        "ray_actor_options": {
            "num_cpus": first.cpus,
            **({"num_gpus": 1} if pool.gpus[0] else {}),
            **({"resources": dict(first.resources)} if first.resources else {}),
        },
        "placement_group_bundles": booked,
        "placement_group_strategy": pool.strategy or "STRICT_PACK",
        **({"placement_group_bundle_label_selector": selectors} if any(selectors) else {}),
    }  # fmt: skip


def one_of(values: list[str]) -> str:
    """In Ray's syntax, which compares nothing by size."""
    return values[0] if len(values) == 1 else f"in({','.join(values)})"


def _tight(value: str) -> str:
    """Ray takes a blank after a comma for a part of the value that follows, which no label has."""
    return value.replace(", ", ",")


def _all_tight(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: _tight(value) for name, value in labels.items()}


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
