"""Conversion of what a pool asks for to what Ray places by: resources, and labels of nodes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from .accepted_capabilities import accepted_capabilities
from .pool_spec import BundleSpec, PoolSpec

ACCELERATOR = "ray.io/accelerator-type"  # set by Ray, such as T4, A10 or H100
COMPUTE_CAPABILITY = "motley/compute-capability"  # set where the node is started, such as 7.5

DRIVER_S = 20.0  # timeout of nvidia-smi, which takes seconds if it has to wake the GPUs


def placement_options(pool: PoolSpec) -> dict[str, Any]:
    """Return the placement of each replica of the pool, as options of its deployment.

    Ray assigns GPUs, unless the pool names one by its number: then nobody else should use it.
    """
    selector: dict[str, str] = {}
    if pool.accelerator is not None:
        selector[ACCELERATOR] = _without_blanks(pool.accelerator)
    if pool.compute_capability is not None:
        selector[COMPUTE_CAPABILITY] = one_of_selector(accepted_capabilities(pool.compute_capability))
    if pool.bundles is not None:
        return _of_bundles(pool, pool.bundles, selector)
    selector = {**_labels_without_blanks(pool.labels), **selector}
    given = 0 if ":" in pool.where else sum(pool.gpus)
    options = {
        "num_cpus": pool.booked_cpus,
        **({"num_gpus": given} if given else {}),
        **({"resources": dict(pool.resources)} if pool.resources else {}),
        **({"label_selector": selector} if selector else {}),
    }
    return {"ray_actor_options": options}


def _of_bundles(pool: PoolSpec, bundles: Sequence[BundleSpec], selector: dict[str, str]) -> dict[str, Any]:
    """Return the options for a replica with bundles, whose actor takes the whole first bundle.

    selector  labels of the nodes of those bundles that have a GPU
    """
    first = bundles[0]
    selectors = [
        {**_labels_without_blanks(pool.labels), **(selector if gpu else {}), **_labels_without_blanks(bundle.labels)}
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


def one_of_selector(values: list[str]) -> str:
    """Return a label selector for one of the values in Ray's syntax, which has no comparison by size."""
    return values[0] if len(values) == 1 else f"in({','.join(values)})"


def _without_blanks(value: str) -> str:
    """Return a selector without blanks after commas: Ray takes these for part of the following value."""
    return value.replace(", ", ",")


def _labels_without_blanks(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: _without_blanks(value) for name, value in labels.items()}


def node_labels() -> dict[str, str]:
    """Return the labels for a node on this machine: the compute capability of its GPUs, if all have the same."""
    found = set(_capabilities_here())
    return {COMPUTE_CAPABILITY: found.pop()} if len(found) == 1 else {}


def _capabilities_here() -> list[str]:
    """Return the compute capabilities of this machine's GPUs from nvidia-smi; none without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DRIVER_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in ended.stdout.splitlines() if line.strip()] if ended.returncode == 0 else []
