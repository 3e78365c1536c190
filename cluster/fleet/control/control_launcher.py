"""Start of the control plane's actor on this machine; tells `motley fleet` how to reach it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...security.auth.api_keys import OWN_TENANT, StoredKey, hash_key, new_key
from ...security.auth.call_guard import is_loopback
from ...security.edge.ports import bracket_host, free_port_block, is_free
from ...security.edge.tls import choose_tls
from ...service_errors import ConfigurationError
from ..spec.serve_options import ADMIN_PORT, ServeOptions
from .backend.serve_backend import AppBuilder
from .control_actor import ControlActor, ControlOptions
from .control_contact import ControlContact, write_contact
from .rpcs.control_server import AdminEndpoint

NAME = "motley-control"
STOP_S = 3.0
READY_S = 60.0


class ControlHandle:
    """Handle of one service's control plane actor."""

    def __init__(self, actor: Any, contact: ControlContact, folder: Path, host: str) -> None:
        self._actor = actor
        self.contact = contact
        self._folder = folder
        self._host = host

    def wait_ready(self) -> None:
        """Wait until the control plane can be called. Raises ConfigurationError if it does not start."""
        try:
            port = ray.get(self._actor.ready.remote(), timeout=READY_S)
        except RayError as error:
            line = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
            raise ConfigurationError(f"the control plane did not start: {line}", code="deploy_failed") from error
        address = f"{bracket_host(self._host)}:{port}"
        if address != self.contact.address:
            self.contact = replace(self.contact, address=address)
            write_contact(self._folder, self.contact)


def start_control(
    app: str,
    build: AppBuilder,
    options: ServeOptions,
    *,
    folder: Path,
    logs: Path | None,
    joined: bool = False,
) -> ControlHandle:
    """Start the control plane on this node, in place of a running one, and write its contact into `folder`.

    Only this user can read the contact. The actor lives as long as the cluster or, on a cluster that was `joined`, as
    long as Serve runs there. Earlier decisions are kept in the cluster, so pools keep their targets.
    """
    stop_control(app)
    endpoint = choose_endpoint(options)
    key = new_key()
    made = ControlOptions(
        app=app,
        build=build,
        endpoint=endpoint,
        own_key=StoredKey(OWN_TENANT, hash_key(key), scope="admin"),
        api_keys=None if options.api_keys is None else options.api_keys.resolve(),
        log_folder=logs,
        joined=joined,
    )
    here = ray.get_runtime_context().get_node_id()
    actor = (
        ray.remote(ControlActor)
        .options(
            name=NAME,
            namespace=app,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=100,
            # Its port and the file with its key are on this machine.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(made)
    )
    contact = ControlContact(f"{bracket_host(endpoint.host)}:{endpoint.port}", key, tls=endpoint.tls is not None)
    write_contact(folder, contact)
    return ControlHandle(actor, contact, folder, endpoint.host)


def is_control_running(app: str) -> bool:
    with suppress(ValueError):
        return bool(ray.get_actor(NAME, app))
    return False


def choose_endpoint(options: ServeOptions) -> AdminEndpoint:
    """Return where the control plane listens: the requested port, else the usual one if it is free, else another free
    one.
    """
    port = options.admin_port
    if port is None:
        port = ADMIN_PORT if is_free(options.admin_host, ADMIN_PORT) else free_port_block(1)
    tls = None
    if not is_loopback(options.admin_host):
        tls = choose_tls(options.tls_cert, options.tls_key, options.client_ca)
    return AdminEndpoint(options.admin_host, port, tls, options.open_health, yields=options.admin_port is None)


def stop_control(app: str) -> None:
    """Stop the control plane, so that nothing is scaled while the service ends, and its name and port are free.

    Does nothing if there is none.
    """
    with suppress(RayError, ValueError):
        actor = ray.get_actor(NAME, app)
        with suppress(TimeoutError):
            ray.get(actor.stop.remote(), timeout=STOP_S)
        ray.kill(actor)
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            ray.get_actor(NAME, app)  # raises once the actor is gone
            time.sleep(0.05)
