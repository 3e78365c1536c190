"""Apply of a fleet file to a running fleet: deploys the difference while the fleet goes on serving."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ...fleet.deployed.deployed_fleet import DeployedFleet, read_deployed, write_deployed
from ...fleet.deployed.prefix_sharing import (
    choose_prefix_sharing,
    limit_embedded_redis,
    print_shared_dtype,
    warn_if_no_embedded_redis,
)
from ...fleet.deployed.redis_reachability import warn_if_unreachable
from ...fleet.deployed.running_services import RunningService
from ...fleet.spec.fleet_changes import FleetChange, list_changes, refuse_fixed_changes, targets_after_change
from ...fleet.spec.fleet_file_loader import FleetFile
from ...fleet.spec.fleet_flags import fleet_from_options
from ...fleet.spec.fleet_spec import FleetSpec
from ...fleet.spec.serve_options import ServeOptions
from ...ray_compat.serve_controller import deployed_versions, find_application
from ...ray_compat.serve_deployments import deploy_application
from ...routing.ingress_broadcast import APPLICATION, set_ingress_pools
from ...security.auth.api_keys import OWN_TENANT, StoredKey
from ...security.edge.haproxy_config import LOOPBACK
from ...security.edge.internal_client import InternalClient
from ...service_errors import ConfigurationError
from ..deployment.routing_settings import fleet_routing_config
from .access_options import choose_ingress_config, choose_internal_client
from .join_cluster import check_nodes, join_cluster
from .ray_settings import node_settings
from .served_model_name import with_served_model_name


def apply_locally(options: ServeOptions, running: RunningService) -> None:
    """Apply to a service of this user on this machine. Raises ConfigurationError before anything has changed."""
    with _alone(running.note), join_cluster(running.address, running.environment):
        deployed = read_deployed()
        if deployed is None or not deployed.by_file:
            message = f"process {running.pid} listens there already, and was not started from a fleet file; stop it"
            raise ConfigurationError(message, code="port_taken")
        _check_capacity(options)
        apply_changes(options, deployed)


def apply_to_cluster(options: ServeOptions, address: str) -> None:
    """Deploy the fleet, or what has changed of it, on a running cluster. Raises ConfigurationError."""
    environment = {setting.name: setting.value for setting in node_settings()}
    with join_cluster(address, environment):
        check_nodes()
        deployed = read_deployed() if _targets() else None
        if deployed is not None:
            apply_changes(options, deployed)
            _control(options)
        else:
            _deploy_first(options)


def _check_capacity(options: ServeOptions) -> None:
    """Raise ConfigurationError if a replica can never be placed: no node joins a cluster of one machine."""
    from .placement_check import check_local_capacity

    check_local_capacity(fleet_from_options(options), options.fleet, started=False)


def _deploy_first(options: ServeOptions) -> None:
    from ..deployment import ray_head
    from . import placement_check

    spec = with_served_model_name(fleet_from_options(options))
    inside = choose_internal_client(options, None)
    ingress_config = replace(choose_ingress_config(options, inside, Path()), log_folder=None)
    own_key = ingress_config.own_key.sha256 if ingress_config.own_key is not None else ""
    print(f"deploying {', '.join(pool.name for pool in spec.pools)}", flush=True)
    prefixes = choose_prefix_sharing(spec)
    warn_if_no_embedded_redis(spec, prefixes)
    warn_if_unreachable(spec.prefix_cache)
    print_shared_dtype(spec, prefixes)
    placement_check.print_pending_pools(spec)
    ray_head.deploy(DeployedFleet(fleet=spec, own_key=own_key, prefixes=prefixes), ingress_config)
    _control(options)
    ray_head.wait_loaded(placement_check.pending_replica_printer(spec))
    print(
        f"{spec.served_model_name or spec.model} is ready, at ports {options.http_port} (HTTP) and "
        f"{options.grpc_port} (gRPC) of the head node",
        flush=True,
    )


def _control(options: ServeOptions) -> None:
    """Start a control plane if none runs there. It manages what is deployed, now and later."""
    from ...fleet.control.control_launcher import is_control_running
    from ..deployment import ray_head

    if not options.control or is_control_running(APPLICATION):
        return
    ingress_config = choose_ingress_config(options, choose_internal_client(options, None), Path())
    control = ray_head.start_joined_control_plane(options, replace(ingress_config, log_folder=None))
    control.wait_ready()
    print(f"the control plane is ready, at {control.contact.address}", flush=True)


def apply_changes(options: ServeOptions, deployed: DeployedFleet) -> None:
    """Apply the changes within `join_cluster`, and print them. Raises ConfigurationError, with the line, before
    anything has changed.
    """
    assert options.fleet is not None
    running, desired = deployed.fleet, _desired_fleet(options, deployed.fleet)
    refuse_fixed_changes(running, FleetFile(desired, options.fleet.lines, options.fleet.said))
    now = _targets()
    targets, bounded = targets_after_change(running, desired, now)
    found = [*list_changes(running, desired), *bounded]
    if not found:
        print("nothing has changed", flush=True)
        return
    kept = [pool.name for pool in desired.pools if running.pool(pool.name) is not None and targets[pool.name]]
    if not kept:
        message = "none of the pools that serve would stay; add the new ones first, and then take the others away"
        raise options.fleet.lines.error(("pools",), message)
    for change in found:
        print(change, flush=True)
    asyncio.run(_deploy(options, deployed, desired, targets, kept))
    print(_summary(found), flush=True)


async def _deploy(
    options: ServeOptions, deployed: DeployedFleet, desired: FleetSpec, targets: Mapping[str, int], kept: list[str]
) -> None:
    """Deploy the changes: new pools exist before the ingress uses them, and old ones are unused before they are
    removed.

    Until the result is recorded as deployed, all of it can be applied again. It is a coroutine, since Serve's handles
    need a running loop, and stay with it.
    """
    from ...fleet.control.state.control_state import ControlState
    from ...fleet.control.state.state_store import GcsStateStore
    from ..deployment.serve_app import build_app, with_models
    from .rollout_overrides import rollout_overrides

    inside = InternalClient(LOOPBACK, options.http_port, options.grpc_port)
    ingress_config = choose_ingress_config(options, inside, Path())
    own_key = StoredKey(OWN_TENANT, deployed.own_key) if deployed.own_key else None
    ingress_config = replace(ingress_config, own_key=own_key, log_folder=deployed.folder)
    before = deployed.prefixes
    prefixes = (
        choose_prefix_sharing(desired) if before is None else choose_prefix_sharing(desired, before.own, before.secret)
    )
    warn_if_no_embedded_redis(desired, prefixes)
    warn_if_unreachable(desired.prefix_cache)
    print_shared_dtype(desired, prefixes)
    await set_ingress_pools(kept)
    overrides = rollout_overrides(
        deployed.fleet, desired, GcsStateStore(APPLICATION).load() or ControlState(), await asyncio.to_thread(_versions)
    )
    fleet = with_models(desired, {name: one.model for name, one in overrides.items()})
    versions = {name: one.version for name, one in overrides.items()}
    app = build_app(fleet, ingress_config=ingress_config, targets=targets, versions=versions, prefixes=prefixes)
    deploy_application(app, APPLICATION)
    await set_ingress_pools([pool.name for pool in desired.pools], fleet_routing_config(desired))
    await asyncio.to_thread(limit_embedded_redis, desired, prefixes)
    write_deployed(replace(deployed, fleet=desired, prefixes=prefixes))


def _desired_fleet(options: ServeOptions, running: FleetSpec) -> FleetSpec:
    """Return the wanted spec, with the running fleet's model name if the file gives none."""
    spec = fleet_from_options(options)
    if spec.served_model_name is None:
        spec = spec.model_copy(update={"served_model_name": running.served_model_name})
    return with_served_model_name(spec)


def _targets() -> dict[str, int]:
    """Return how many replicas each pool is to have now, whoever set that."""
    pools = (find_application(APPLICATION) or {}).get("deployments", {})
    return {name: int(pool["target_num_replicas"]) for name, pool in pools.items()}


def _versions() -> dict[str, str]:
    """Return the versions of the deployed pools, as Serve has them."""
    return deployed_versions(APPLICATION, list(_targets()))


def _summary(found: list[FleetChange]) -> str:
    replaced = sorted({change.pool or "all" for change in found if change.kind == "restarted"})
    return f"applied; replicas are replaced: {', '.join(replaced)}" if replaced else "applied; no replica is replaced"


@contextmanager
def _alone(note: Path) -> Iterator[None]:
    """Hold a lock on the file `note`, so that others wait."""
    with note.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
