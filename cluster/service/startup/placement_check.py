"""Reports of replicas that cannot be placed: at once if nothing can change it, while waiting if a node may still join.

Import this after the settings are in the environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...fleet.control.backend.node_capacity import (
    MissingCapacity,
    find_missing_capacity,
    find_overbooking,
    replica_needs,
)
from ...fleet.control.backend.pending_reason import NodeResources, combine_needs, pending_reason
from ...fleet.control.backend.ray_nodes import living_nodes
from ...fleet.spec.fleet_file_loader import FleetFile
from ...fleet.spec.fleet_spec import FleetSpec
from ...ray_compat.cluster_state import labels_match
from ...ray_compat.serve_controller import application_details
from ...routing.ingress_broadcast import APPLICATION
from ...service_errors import ConfigurationError

POLL_INTERVAL_S = 2.0  # interval of the checks of what waits
_FLAGS = {"device": "--device", "replicas": "--replicas"}
_ELSEWHERE = "or serve on a cluster that has it (--address)"
_REMEDIES = {
    "device": f"`motley doctor` tells what there is; serve on a CPU (device: cpu, --device cpu), {_ELSEWHERE}",
    "replicas": "start with fewer",
    "strategy": f"take STRICT_PACK, {_ELSEWHERE}",
    "cpus": "book fewer",
}
_REMEDY = f"take it out, start with 0 replicas, {_ELSEWHERE}"


def check_local_capacity(spec: FleetSpec, fleet: FleetFile | None, *, started: bool = True) -> None:
    """Check placement on a cluster that `motley serve` has started, which no other node joins. `started`: it starts
    now.

    Raises ConfigurationError with the remedy if a pool that starts with replicas could never have one. For other pools,
    which may do without, it prints what is missing.
    """
    nodes = living_nodes()
    refuse_unplaceable(spec, nodes, fleet, _report)
    if started and (lack := find_overbooking(spec, nodes)) is not None:
        raise _refusal(spec, lack, fleet)


def refuse_unplaceable(
    spec: FleetSpec, nodes: Sequence[NodeResources], fleet: FleetFile | None, report: Callable[[str], None]
) -> None:
    for lack in find_missing_capacity(spec, nodes, labels_match):
        if spec.pools[lack.pool].replicas.start:
            raise _refusal(spec, lack, fleet)
        report(f"pool {spec.pools[lack.pool].name} cannot have a replica here: {lack.message}")


def print_pending_pools(spec: FleetSpec) -> None:
    """Print which pools wait for a node, on a cluster whose nodes come and go; they are deployed all the same."""
    for lack in find_missing_capacity(spec, living_nodes(), labels_match):
        _report(f"pool {spec.pools[lack.pool].name} waits for a node: {lack.message}")


def pending_replica_printer(spec: FleetSpec) -> Callable[[], None]:
    """Return a function to call repeatedly while replicas start: it prints why some are not placed, each reason
    once.
    """
    reported: dict[str, str] = {}
    checked_s = time.monotonic()

    def glance() -> None:
        nonlocal checked_s
        if time.monotonic() - checked_s < POLL_INTERVAL_S:
            return
        checked_s = time.monotonic()
        app = application_details(APPLICATION) or {}
        for name, reason in _unplaced(spec, app.get("deployments", {}), living_nodes()):
            if reported.get(name) != reason:
                _report(f"pool {name} waits: {reason}")
            reported[name] = reason

    return glance


def _unplaced(
    spec: FleetSpec, deployments: Mapping[str, Mapping[str, Any]], nodes: Sequence[NodeResources]
) -> Iterator[tuple[str, str]]:
    """Yield the pools with a replica that has no node, and why, if known."""
    for pool in spec.pools:
        replicas = deployments.get(pool.name, {}).get("replicas", ())
        if any(one["state"] == "STARTING" and one.get("node_id") is None for one in replicas):
            needs = replica_needs(pool)
            reason = pending_reason(needs if pool.spread else [combine_needs(needs)], nodes, labels_match)
            if reason:
                yield pool.name, reason


def _refusal(spec: FleetSpec, lack: MissingCapacity, fleet: FleetFile | None) -> ConfigurationError:
    message = f"{lack.message}; {_REMEDIES.get(lack.entry, _REMEDY)}"
    if fleet is not None:
        return fleet.lines.error(("pools", lack.pool, lack.entry), message)
    flag = _FLAGS.get(lack.entry)
    return ConfigurationError(f"{flag}: {message}" if flag else message, param=flag, code="no_place")


def _report(line: str) -> None:
    print(line, flush=True)
