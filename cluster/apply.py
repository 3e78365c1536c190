"""Apply of a fleet file to a running fleet: deploys the difference while the fleet goes on serving."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .access import choose_edge, choose_entrance, choose_inside
from .auth.keys import StoredKey
from .edge.edge import LOOPBACK
from .edge.inside import Inside
from .entrance import OWN_TENANT
from .every_ingress import use_pools
from .failures import ConfigurationError
from .fleet.change import Change, changes, check_fixed, targets_after
from .fleet.file import FleetFile
from .fleet.flags import fleet_of
from .fleet.running import Running
from .fleet.spec import FleetSpec
from .fleet.store import APPLICATION, Deployed, read_deployed, write_deployed
from .join import check_nodes, joined
from .named import named
from .objectives import routing_of
from .options import ServeOptions
from .prefix.reach import tell_silent
from .prefix.shared import limit_own, settle, tell_unreached, tell_wire
from .settings import node_settings


def apply_here(options: ServeOptions, running: Running) -> None:
    """Apply to a service of this user on this machine. Raises ConfigurationError before anything has changed."""
    with _alone(running.note), joined(running.address, running.environment):
        deployed = read_deployed()
        if deployed is None or not deployed.by_file:
            message = f"process {running.pid} listens there already, and was not started from a fleet file; stop it"
            raise ConfigurationError(message, code="port_taken")
        _check_room(options)
        apply(options, deployed)


def apply_there(options: ServeOptions, address: str) -> None:
    """Deploy the fleet, or what has changed of it, on a running cluster. Raises ConfigurationError."""
    choose_edge(options, haproxy=False)  # refuses what takes HAProxy
    environment = {setting.name: setting.value for setting in node_settings()}
    with joined(address, environment):
        check_nodes()
        deployed = read_deployed() if _targets() else None
        if deployed is not None:
            apply(options, deployed)
            _control(options)
        else:
            _deploy_first(options)


def _check_room(options: ServeOptions) -> None:
    """Raise ConfigurationError if a replica can never be placed: no node joins a cluster of one machine."""
    from .placing import check_room_here

    check_room_here(fleet_of(options), options.fleet, started=False)


def _deploy_first(options: ServeOptions) -> None:
    from . import head, placing

    spec = named(fleet_of(options))
    inside = choose_inside(options, None)
    entrance = replace(choose_entrance(options, inside, Path()), log_folder=None)
    own_key = entrance.own_key.sha256 if entrance.own_key is not None else ""
    print(f"deploying {', '.join(pool.name for pool in spec.pools)}", flush=True)
    prefixes = settle(spec)
    tell_unreached(spec, prefixes)
    tell_silent(spec.prefix_cache)
    tell_wire(spec, prefixes)
    placing.tell_room_there(spec)
    head.deploy(Deployed(fleet=spec, own_key=own_key, prefixes=prefixes), entrance)
    _control(options)
    head.wait_loaded(placing.waiting_told(spec))
    print(
        f"{spec.served_model_name or spec.model} is ready, at ports {options.http_port} (HTTP) and "
        f"{options.grpc_port} (gRPC) of the head node",
        flush=True,
    )


def _control(options: ServeOptions) -> None:
    """Start a control plane if none runs there. It manages what is deployed, now and later."""
    from . import head
    from .control.start import runs

    if not options.control or runs(APPLICATION):
        return
    entrance = choose_entrance(options, choose_inside(options, None), Path())
    control = head.joined_control(options, replace(entrance, log_folder=None))
    control.wait_ready()
    print(f"the control plane is ready, at {control.contact.address}", flush=True)


def apply(options: ServeOptions, deployed: Deployed) -> None:
    """Apply the changes within `joined`, and print them. Raises ConfigurationError, with the line, before anything
    has changed.
    """
    assert options.fleet is not None
    running, wanted = deployed.fleet, _wanted(options, deployed.fleet)
    check_fixed(running, FleetFile(wanted, options.fleet.lines, options.fleet.said))
    now = _targets()
    targets, bounded = targets_after(running, wanted, now)
    found = [*changes(running, wanted), *bounded]
    if not found:
        print("nothing has changed", flush=True)
        return
    kept = [pool.name for pool in wanted.pools if running.pool(pool.name) is not None and targets[pool.name]]
    if not kept:
        message = "none of the pools that serve would stay; add the new ones first, and then take the others away"
        raise options.fleet.lines.error(("pools",), message)
    for change in found:
        print(change, flush=True)
    asyncio.run(_deploy(options, deployed, wanted, targets, kept))
    print(_summary(found), flush=True)


async def _deploy(
    options: ServeOptions, deployed: Deployed, wanted: FleetSpec, targets: Mapping[str, int], kept: list[str]
) -> None:
    """Deploy the changes: new pools exist before the ingress uses them, and old ones are unused before they are
    removed.

    Until the result is recorded as deployed, all of it can be applied again. It is a coroutine, since Serve's handles
    need a running loop, and stay with it.
    """
    from .app import build_app, with_models
    from .control.state import State
    from .control.store import KvStore
    from .head import run_app
    from .rolled import rolled

    inside = Inside(LOOPBACK, options.http_port, options.grpc_port)
    entrance = choose_entrance(options, inside, Path())
    own_key = StoredKey(OWN_TENANT, deployed.own_key) if deployed.own_key else None
    entrance = replace(entrance, own_key=own_key, log_folder=deployed.folder)
    before = deployed.prefixes
    prefixes = settle(wanted) if before is None else settle(wanted, before.own, before.secret)
    tell_unreached(wanted, prefixes)
    tell_silent(wanted.prefix_cache)
    tell_wire(wanted, prefixes)
    await use_pools(kept)
    known = rolled(deployed.fleet, wanted, KvStore(APPLICATION).kept() or State(), await asyncio.to_thread(_versions))
    fleet = with_models(wanted, {name: one.model for name, one in known.items()})
    versions = {name: one.version for name, one in known.items()}
    run_app(build_app(fleet, entrance=entrance, targets=targets, versions=versions, prefixes=prefixes))
    await use_pools([pool.name for pool in wanted.pools], routing_of(wanted))
    await asyncio.to_thread(limit_own, wanted, prefixes)
    write_deployed(replace(deployed, fleet=wanted, prefixes=prefixes))


def _wanted(options: ServeOptions, running: FleetSpec) -> FleetSpec:
    """Return the wanted spec, with the running fleet's model name if the file gives none."""
    spec = fleet_of(options)
    if spec.served_model_name is None:
        spec = spec.model_copy(update={"served_model_name": running.served_model_name})
    return named(spec)


def _targets() -> dict[str, int]:
    """Return how many replicas each pool is to have now, whoever set that."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    pools = client.get_serve_details()["applications"].get(APPLICATION, {}).get("deployments", {})
    return {name: int(pool["target_num_replicas"]) for name, pool in pools.items()}


def _versions() -> dict[str, str]:
    """Return the versions of the deployed pools, as Serve has them."""
    import ray
    from ray.serve.context import _get_global_client
    from ray.serve.generated.serve_pb2 import DeploymentRoute

    client: Any = _get_global_client()
    names = list(_targets())
    routes = ray.get([client._controller.get_deployment_info.remote(name, APPLICATION) for name in names])
    known = map(DeploymentRoute.FromString, routes)
    return {name: str(route.deployment_info.version) for name, route in zip(names, known, strict=True)}


def _summary(found: list[Change]) -> str:
    replaced = sorted({change.pool or "all" for change in found if change.kind == "restarted"})
    return f"applied; replicas are replaced: {', '.join(replaced)}" if replaced else "applied; no replica is replaced"


@contextmanager
def _alone(note: Path) -> Iterator[None]:
    """Hold a lock on the file `note`, so that others wait."""
    with note.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
