"""Starts the control plane's actor on this machine, and tells `motley fleet` how to reach it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..auth.guard import is_loopback
from ..auth.keys import StoredKey, hash_key, new_key
from ..edge.ports import bracketed, is_free, settled_block
from ..edge.tls import choose_tls
from ..entrance import OWN_TENANT
from ..failures import ConfigurationError
from ..options import ADMIN_PORT, ServeOptions
from .actor import ControlActor, ControlOptions
from .contact import Contact, write_contact
from .serve_fleet import Build
from .server import AdminDoor

NAME = "motley-control"
STOP_S = 3.0
READY_S = 60.0


class Control:
    """The actor of one service."""

    def __init__(self, actor: Any, contact: Contact, folder: Path, host: str) -> None:
        self._actor = actor
        self.contact = contact
        self._folder = folder
        self._host = host

    def wait_ready(self) -> None:
        """Raises ConfigurationError when it does not start."""
        try:
            port = ray.get(self._actor.ready.remote(), timeout=READY_S)
        except RayError as error:
            line = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
            raise ConfigurationError(f"the control plane did not start: {line}", code="deploy_failed") from error
        address = f"{bracketed(self._host)}:{port}"
        if address != self.contact.address:
            self.contact = replace(self.contact, address=address)
            write_contact(self._folder, self.contact)


def start_control(
    app: str,
    build: Build,
    options: ServeOptions,
    *,
    folder: Path,
    logs: Path | None,
    joined: bool = False,
) -> Control:
    """On this node, in place of the one there may be. How to reach it is written into `folder`, for this user alone.

    It lives as long as the cluster; on one that was `joined`, as long as Serve does there. What was decided is kept
    there: pools keep their targets.
    """
    stop_control(app)
    door = choose_door(options)
    key = new_key()
    made = ControlOptions(
        app=app,
        build=build,
        door=door,
        own_key=StoredKey(OWN_TENANT, hash_key(key), admin=True),
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
            # Its port and the file of its key are this machine's.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(made)
    )
    contact = Contact(f"{bracketed(door.host)}:{door.port}", key, tls=door.tls is not None)
    write_contact(folder, contact)
    return Control(actor, contact, folder, door.host)


def runs(app: str) -> bool:
    with suppress(ValueError):
        return bool(ray.get_actor(NAME, app))
    return False


def choose_door(options: ServeOptions) -> AdminDoor:
    """A port that is asked for, else the usual one if it is free, else another."""
    port = options.admin_port
    if port is None:
        port = ADMIN_PORT if is_free(options.admin_host, ADMIN_PORT) else settled_block(1)
    tls = None
    if not is_loopback(options.admin_host):
        tls = choose_tls(options.tls_cert, options.tls_key, options.client_ca)
    return AdminDoor(options.admin_host, port, tls, options.open_health, yields=options.admin_port is None)


def stop_control(app: str) -> None:
    """So that nothing is scaled while the service ends, and its name and port are free. None there is as good."""
    with suppress(RayError, ValueError):
        actor = ray.get_actor(NAME, app)
        with suppress(TimeoutError):
            ray.get(actor.stop.remote(), timeout=STOP_S)
        ray.kill(actor)
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            ray.get_actor(NAME, app)  # raises as soon as there is none
            time.sleep(0.05)
