"""Ray head of the service's own, with Serve on it. Import this after the settings are in the environment."""

from __future__ import annotations

import asyncio
import atexit
import io
import logging
import math
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ...fleet.control.control_contact import joined_service_folder
from ...fleet.control.control_launcher import ControlHandle, start_control, stop_control
from ...fleet.deployed.deployed_fleet import DeployedFleet, write_deployed
from ...fleet.spec.fleet_spec import FleetSpec
from ...fleet.spec.ray_placement import node_labels
from ...fleet.spec.serve_options import ServeOptions
from ...process_tree import wait_until
from ...protos import inference_pb2 as pb
from ...protos import inference_pb2_grpc
from ...ray_compat.environment import HAPROXY_ADMIN_SOCKET, HAPROXY_CONFIG_FILE
from ...ray_compat.local_node import start_node
from ...ray_compat.serve_controller import application_details
from ...ray_compat.serve_deployments import deploy_application
from ...ray_compat.visible_names import logs_folder, node_file
from ...routing.ingress_broadcast import APPLICATION, call_every_ingress
from ...security.edge.haproxy_admin import open_requests, refuse_connections, replicas_up, statistics
from ...security.edge.haproxy_config import LOOPBACK
from ...security.edge.haproxy_workers import haproxy_workers
from ...security.edge.internal_client import InternalClient
from ...security.edge.ports import is_listening
from ...service_errors import ConfigurationError
from ...transport.grpc_server.servicers import SERVICER_FUNCTIONS
from ..supervision.watchdog import ServiceLost
from .ingress_config import IngressConfig
from .serve_app import build_app, rebuild_app

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 * 2**20  # messages travel by value; Ray would take 30% of memory
MIN_PLACES = 64
INGRESS_TIMEOUT_S = 60.0  # from a model that is ready to ports that answer; seconds are usual
SERVE_END_S = 4.0  # what Serve needs to end when no stream is left, and half as much again
DRAIN_CALL_S = 1.0
LAST_WORD_S = 0.5
RAY_END_S = 5.0
CONTROL_END_S = 1.0
_POLL_S = 0.05


def start_ray(folder: Path, spec: FleetSpec) -> str:
    """Start a new cluster, never join one. Returns the dashboard's address. Raises ServiceLost if Ray does not start.

    On a machine that is busy, or reads Python's files from a slow disk, Ray's raylet gives up after 15 s, and there is
    no setting for that. Another start may find the files in memory.
    """
    max_cpus = sum(pool.replicas.max * pool.booked_cpus for pool in spec.pools)
    try:
        context = start_node(
            folder,
            # Ray's are places, not cores: for all that may come, their successors beside them, and later pools.
            num_cpus=max(math.ceil(2 * max_cpus), MIN_PLACES, os.cpu_count() or 1),
            labels=node_labels(),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=spec.listen.dashboard_port,  # None: 8265 or the next one that it gets
            logging_level=logging.ERROR,
            log_to_driver=False,
            namespace=APPLICATION,
        )
    except Exception as error:  # Ray has no type for it: a daemon that did not come up in time, above all
        raise ServiceLost(f"Ray did not start: {str(error).rstrip('.')}") from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return str(context.dashboard_url)


def cluster_address() -> str:
    """Return the address at which others join the cluster."""
    return str(ray.get_runtime_context().gcs_address)


def deploy(
    deployed: DeployedFleet,
    ingress_config: IngressConfig,
    make_worker: Callable[[], Any] | None = None,
    loading: Path | None = None,
) -> None:
    """Start Serve's proxies and the application; returns before it is ready. `loading`: as in `build_app`."""
    with _serve_errors_in_one_line():
        _start_serve(deployed.fleet)
    write_deployed(deployed)  # before the ingress begins, which reads it
    deploy_application(
        build_app(deployed.fleet, make_worker, ingress_config, loading, prefixes=deployed.prefixes), APPLICATION
    )


def start_control_plane(
    options: ServeOptions, ingress_config: IngressConfig, make_worker: Callable[[], Any] | None, folder: Path
) -> ControlHandle:
    """Start the control plane of what was deployed."""
    build = partial(rebuild_app, make_worker, ingress_config, folder)
    return start_control(APPLICATION, build, options, folder=folder.parent, logs=logs_folder(folder))


def start_joined_control_plane(options: ServeOptions, ingress_config: IngressConfig) -> ControlHandle:
    """Start the control plane on a cluster that was started by others: it runs on this node."""
    folder = joined_service_folder(cluster_address())
    build = partial(rebuild_app, None, ingress_config, None)
    return start_control(APPLICATION, build, options, folder=folder, logs=None, joined=True)


def _start_serve(spec: FleetSpec) -> None:
    listen = spec.listen
    serve.start(
        proxy_location="HeadOnly",
        # With HAProxy the ingress's own ports stay on loopback: HAProxy listens where it was asked (haproxy_config.py).
        http_options={
            "host": LOOPBACK if HAPROXY_ADMIN_SOCKET in os.environ else listen.host,
            "port": listen.http_port,
        },
        grpc_options={
            "port": listen.grpc_port,
            "grpc_servicer_functions": list(SERVICER_FUNCTIONS),
            "enable_reflection": False,  # the ingress has its own, behind its guard
        },
    )


@contextmanager
def _serve_errors_in_one_line() -> Iterator[None]:
    """Convert Serve's failures to start to ConfigurationError in one line, with HAProxy's last message if it failed."""
    try:
        yield
    except RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        alerts = [line for line in lines if line.startswith(("[ALERT]", "ValueError"))]
        raise ConfigurationError(f"Serve did not start: {(alerts or lines)[-1]}", code="deploy_failed") from error


def wait_loaded(glance: Callable[[], None]) -> None:
    """Wait as long as a model takes to load, calling `glance` now and then. Raises ConfigurationError if it cannot
    load.
    """

    def running() -> bool:
        glance()
        return _running()

    wait_until(running)


def wait_ready(inside: InternalClient, ingresses: int = 1) -> str:
    """Wait until the loaded model answers over HTTP and gRPC; return its name. Raises ServiceLost if it does not."""
    health = inside.request("/health")
    _expect(lambda: bool(_get(health)), f"{health.full_url} does not answer")
    if HAPROXY_ADMIN_SOCKET in os.environ:
        # Until HAProxy knows the ingress it uses Serve's own proxy, which is slow and loses cancellations.
        up = ingresses * len(("http", "grpc"))
        _expect(lambda: replicas_up(_haproxy_statistics()) >= up, "HAProxy does not see the ingress")
    with grpc.insecure_channel(inside.grpc) as channel:
        try:
            model = inference_pb2_grpc.InferenceStub(channel).GetModel(
                pb.GetModelRequest(), wait_for_ready=True, timeout=INGRESS_TIMEOUT_S, metadata=inside.metadata
            )
        except grpc.RpcError as error:
            raise ServiceLost(f"{inside.grpc} does not answer: {error.code().name}: {error.details()}") from error
        return str(model.name)


def stop_gracefully(drain_s: float) -> None:
    """Let streams end for `drain_s` at most, then end Serve and Ray."""
    if not ray.is_initialized():
        return
    # Ray tells the planned end of Serve's controller as an error, on stdout and in its log.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        # Serve's own draining ends HAProxy first, and so every stream with it.
        gcs = cluster_address()  # while there is one to ask
        _within(gcs, CONTROL_END_S, partial(stop_control, APPLICATION))
        deadline = time.monotonic() + drain_s
        _within(gcs, drain_s + LAST_WORD_S + DRAIN_CALL_S, lambda: asyncio.run(_drain(gcs, deadline)))
        _within(gcs, SERVE_END_S, serve.shutdown)
        _within(gcs, RAY_END_S, ray.shutdown)
    atexit.unregister(ray.shutdown)  # it would wait for daemons that are no more


def stop_after_loss(drain_s: float) -> None:
    """Let streams end after a part of Ray is lost: as `stop_gracefully` does if the ingresses can be called, else at
    HAProxy.
    """
    atexit.unregister(ray.shutdown)  # it would wait for daemons that are no more
    if not ray.is_initialized():
        return
    gcs, deadline = cluster_address(), time.monotonic() + drain_s
    admin = _of_haproxy(HAPROXY_ADMIN_SOCKET)
    if admin is not None:
        refuse_connections(admin)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        _within(gcs, drain_s + LAST_WORD_S + DRAIN_CALL_S, lambda: asyncio.run(_drain(gcs, deadline)))
    left_s = deadline - time.monotonic()
    wait_until(lambda: not open_requests(_haproxy_statistics()) and len(_haproxy_workers()) <= 1, left_s)


async def _drain(gcs: str, deadline: float) -> None:
    """Refuse new requests; return when no stream is left, neither in an ingress nor on its way to a client, and what a
    collector is to know of them has been sent.

    Streams that are left at the deadline end with an error, and have LAST_WORD_S to be sent. An ingress that is too
    busy to answer is asked again, while Ray's GCS lives. It is a coroutine, since Serve's handles need a running loop.
    """
    try:
        ingresses = serve.get_app_handle(APPLICATION)
        while await _call_all(ingresses, "drain") != 0 or open_requests(_haproxy_statistics()):
            if time.monotonic() > deadline + LAST_WORD_S or not _lives(gcs):
                return
            if time.monotonic() > deadline:
                await _call_all(ingresses, "end_streams")
            await asyncio.sleep(_POLL_S)
        await _call_all(ingresses, "flush_traces")
        # Workers from before a reload may still hand on what the ingress has said.
        last = time.monotonic() + LAST_WORD_S
        while len(_haproxy_workers()) > 1 and time.monotonic() < last:
            await asyncio.sleep(_POLL_S)
    except (RayError, RayServeException) as error:
        log.debug("draining: %s", error)  # there is nothing to drain, or nobody to do it


async def _call_all(ingresses: Any, method: str) -> int | None:
    """Return the sum of all ingresses' answers; None if they do not answer in time."""
    with suppress(TimeoutError):
        return sum(each or 0 for each in await call_every_ingress(ingresses, method, timeout_s=DRAIN_CALL_S))
    return None


def _within(gcs: str, seconds: float, action: Callable[[], None]) -> None:
    """Run an action; go on without it when it takes longer, or when Ray's GCS is dead, for which it would wait in vain.

    A signal to the whole process group, as `timeout` and service managers send it, reaches Ray's daemons too.
    """
    given_up = False

    def run() -> None:
        try:
            action()
        except Exception as error:
            if _lives(gcs) and not given_up:
                raise
            log.debug("given up: %s", error)  # whatever it misses has ended meanwhile

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline and _lives(gcs):
        thread.join(_POLL_S)
    given_up = thread.is_alive()


def _lives(gcs: str) -> bool:
    host, _, port = gcs.rpartition(":")
    return is_listening(host.strip("[]"), int(port))


def _expect(condition: Callable[[], bool], otherwise: str) -> None:
    if not wait_until(condition, INGRESS_TIMEOUT_S):
        raise ServiceLost(f"{otherwise}, {INGRESS_TIMEOUT_S:g} s after the model was ready")


def _running() -> bool:
    # Not `serve.status`, which refuses what Serve itself says of a pool that was deployed with no replica.
    app = application_details(APPLICATION)
    if app is None:
        return False
    if app["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
        raise ConfigurationError(_reason(app), code="deploy_failed")
    return bool(app["status"] == "RUNNING")


def _reason(app: Mapping[str, Any]) -> str:
    """Return the last line of the trace that Serve keeps: Motley's own error, if it was one."""
    messages = [deployment["message"] for deployment in app["deployments"].values() if deployment["message"]]
    lines = [line.strip() for line in "\n".join(messages or [app["message"]]).splitlines() if line.strip()]
    ours = [line for line in lines if re.match(r"(motley\.|[\w.]*Error)\S*: ", line)]
    return re.sub(r"^motley\.[\w.]+: ", "", (ours or lines or ["the service did not start"])[-1])


def _haproxy_statistics() -> str:
    admin = _of_haproxy(HAPROXY_ADMIN_SOCKET)
    return "" if admin is None else statistics(admin)


def _haproxy_workers() -> list[int]:
    config = _of_haproxy(HAPROXY_CONFIG_FILE)
    return [] if config is None else haproxy_workers(config)


def _of_haproxy(setting: str) -> Path | None:
    """Return the path that a setting of HAProxy names, on this node; None without HAProxy (ray_settings.py)."""
    path = os.environ.get(setting)
    return None if path is None else node_file(path, ray.get_runtime_context().get_node_id())


def _get(url: str | urllib.request.Request) -> str:
    """Return the body of a successful answer; an empty string for any other."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, OSError):
        return ""
