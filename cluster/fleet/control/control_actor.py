"""Process of the control plane: a named Ray actor that Ray restarts whenever it ends."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import ray

from ....replicas.host.process_logging import log_to_stderr
from ...ray_compat.serve_controller import find_controller
from ...security.auth.api_keys import KeyRing, StoredKey
from ...security.auth.key_file import KeyFile
from ...transport import access_log
from .backend.serve_backend import AppBuilder, ServeBackend
from .fleet_metrics import fleet_publisher
from .reconciler.fleet_reconciler import FleetReconciler
from .rpcs.control_server import AdminEndpoint, start_on_free_port
from .state.control_state import ControlState
from .state.state_store import GcsStateStore

log = logging.getLogger(__name__)

STOP_S = 1.0  # time that open calls get to end when the server is stopped
SERVE_CHECK_S, MAX_SERVE_MISSES = (
    5.0,
    3,
)  # interval of the checks that Serve still runs, and failed checks in a row until it is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """Arguments of the control plane's actor, the same at each restart.

    app, build  arguments of `ServeBackend`
    endpoint    address and TLS settings of its server
    own_key     key that `motley fleet` uses on this machine
    api_keys    file with the keys of other admins
    log_folder  folder for the log of admins' calls
    joined      the Ray cluster is not the service's own: it continues without Serve, and nodes may join it
    """

    app: str
    build: AppBuilder
    endpoint: AdminEndpoint
    own_key: StoredKey
    api_keys: Path | None = None
    log_folder: Path | None = None
    joined: bool = False


class ControlActor:
    """Ray actor that runs the control plane; its server answers as soon as `__init__` has returned."""

    async def __init__(self, options: ControlOptions) -> None:  # type: ignore[misc]  # Ray awaits it
        log_to_stderr()
        logging.getLogger("motley.cluster.fleet.control").setLevel(logging.INFO)
        access_log.write_to(options.log_folder, "admin.log")
        keys = KeyRing([options.own_key])
        store = GcsStateStore(options.app)
        state = store.load() or ControlState()
        fleet = ServeBackend(options.app, options.build, joined=options.joined)
        self._plane = FleetReconciler(fleet, store, state)
        both = keys if options.api_keys is None else KeyFile(options.api_keys, [options.own_key])
        endpoint = options.endpoint
        is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        if is_restarted and (port := store.port()) is not None:
            endpoint = replace(endpoint, port=port, yields=False)  # keep the port that clients know
        self._server: grpc.aio.Server
        self._server, self._port = await start_on_free_port(self._plane, both, endpoint)
        store.store_port(self._port)
        self._loop = asyncio.create_task(self._plane.run())
        publisher = fleet_publisher(options.app, self._plane, ray.get_runtime_context().get_worker_id())
        self._metrics_task = asyncio.create_task(publisher.run())
        self._end = asyncio.create_task(_end_with_serve()) if options.joined else None
        log.info("the control plane has started: generation %d, port %d", state.generation, self._port)

    async def ready(self) -> int:
        """Return the port of the server, once it can be called."""
        return self._port

    async def stop(self) -> None:
        self._loop.cancel()
        await self._server.stop(STOP_S)


async def _end_with_serve() -> None:
    """End this actor once Serve is gone, since whoever ended Serve has ended the service."""
    missed = 0
    while missed < MAX_SERVE_MISSES:
        await asyncio.sleep(SERVE_CHECK_S)
        missed = missed + 1 if await asyncio.to_thread(_serve_is_gone) else 0
    log.info("Serve has ended, so the control plane ends too")
    ray.kill(ray.get_runtime_context().current_actor)


def _serve_is_gone() -> bool:
    try:
        find_controller()
    except ValueError:
        return True
    return False
