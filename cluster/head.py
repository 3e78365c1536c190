"""A Ray head of our own, and Serve on it. Import after the settings are in the environment."""

from __future__ import annotations

import asyncio
import atexit
import io
import logging
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import grpc
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from .app import NAME, build_app
from .edge.edge import LOOPBACK
from .edge.haproxy import open_requests, replicas_up, statistics
from .edge.inside import Inside
from .edge.ports import listens
from .entrance import Entrance
from .failures import ConfigurationError
from .options import ServeOptions
from .processes import wait_until
from .protos import inference_pb2 as pb
from .protos import inference_pb2_grpc
from .web.servicers import SERVICER_FUNCTIONS

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 * 2**20  # messages travel by value; Ray would take 30% of memory
DOOR_S = 60.0  # from a model that is ready to doors that answer; seconds are usual
SERVE_END_S = 4.0  # what Serve needs to end when no stream is left, and half as much again
DRAIN_CALL_S = 1.0
LAST_WORD_S = 0.5
RAY_END_S = 5.0
_POLL_S = 0.05
_HAPROXY = "RAY_SERVE_HAPROXY_SOCKET_PATH"  # set by settings.py when there is one


def start_ray(folder: Path, options: ServeOptions) -> str:
    """Start a new cluster, never join one. Returns the dashboard's address."""
    context = ray.init(
        address="local",
        num_cpus=max(options.replicas, os.cpu_count() or 1),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=options.dashboard_port,  # None: 8265 or the next one that it gets
        logging_level=logging.ERROR,
        log_to_driver=False,
        namespace=NAME,
        _temp_dir=str(folder),
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return str(context.dashboard_url)


def deploy(
    model: str, options: ServeOptions, entrance: Entrance, make_worker: Any = None, loading: Path | None = None
) -> None:
    """Start Serve's proxies and the application; returns before it is ready. `loading`: as in `build_app`."""
    with _told_in_a_line():
        _start_serve(options)
    serve._run(
        build_app(model, options, make_worker, entrance, loading),
        name=NAME,
        route_prefix="/",
        external_scaler_enabled=True,  # Ray's dashboard scales the pool, for who has its token
        _blocking=False,
    )


def _start_serve(options: ServeOptions) -> None:
    serve.start(
        proxy_location="HeadOnly",
        # With HAProxy the ingress's own ports stay on loopback: HAProxy listens where it was asked (edge.py).
        http_options={"host": LOOPBACK if _HAPROXY in os.environ else options.host, "port": options.http_port},
        grpc_options={
            "port": options.grpc_port,
            "grpc_servicer_functions": list(SERVICER_FUNCTIONS),
            "enable_reflection": False,  # the ingress has its own, behind its guard
        },
    )


@contextmanager
def _told_in_a_line() -> Iterator[None]:
    """Serve's own failures to start, with HAProxy's last word if it was that."""
    try:
        yield
    except RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        alerts = [line for line in lines if line.startswith(("[ALERT]", "ValueError"))]
        raise ConfigurationError(f"Serve did not start: {(alerts or lines)[-1]}", code="deploy_failed") from error


def wait_loaded(glance: Callable[[], None]) -> None:
    """Wait as long as a model takes to load, with a glance now and then. Raises ConfigurationError if it cannot."""

    def running() -> bool:
        glance()
        return _running()

    wait_until(running)


def wait_ready(inside: Inside) -> str:
    """Wait until the loaded model answers on both doors; its name. Raises ConfigurationError if it does not."""
    health = inside.request("/health")
    _expect(lambda: bool(_get(health)), f"{health.full_url} does not answer")
    if _HAPROXY in os.environ:
        # Until HAProxy knows the ingress it uses Serve's own proxy, which is slow and loses cancellations.
        _expect(lambda: replicas_up(_haproxy_statistics()) >= len(("http", "grpc")), "HAProxy does not see the ingress")
    with grpc.insecure_channel(inside.grpc) as channel:
        model = inference_pb2_grpc.InferenceStub(channel).GetModel(
            pb.GetModelRequest(), wait_for_ready=True, timeout=30, metadata=inside.metadata
        )
        return str(model.name)


def stop(drain_s: float) -> None:
    """Let streams end for `drain_s` at most, then end Serve and Ray."""
    if not ray.is_initialized():
        return
    # Ray tells the planned end of Serve's controller as an error, on stdout and in its log.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        # Serve's own draining ends HAProxy first, and so every stream with it.
        gcs = str(ray.get_runtime_context().gcs_address)  # while there is one to ask
        _within(gcs, drain_s + LAST_WORD_S + DRAIN_CALL_S, lambda: asyncio.run(_drain(time.monotonic() + drain_s)))
        _within(gcs, SERVE_END_S, serve.shutdown)
        _within(gcs, RAY_END_S, ray.shutdown)
    atexit.unregister(ray.shutdown)  # it would wait for daemons that are no more


async def _drain(deadline: float) -> None:
    """Refuse new requests; return when no stream is left, neither in the ingress nor on its way to a client.

    Streams that are left at the deadline are told so, and have LAST_WORD_S to arrive.
    A coroutine, since Serve's handles want a running loop.
    """
    try:
        ingress = serve.get_app_handle(NAME)
        while await asyncio.wait_for(ingress.drain.remote(), DRAIN_CALL_S) or open_requests(_haproxy_statistics()):
            if time.monotonic() > deadline + LAST_WORD_S:
                return
            if time.monotonic() > deadline:
                await asyncio.wait_for(ingress.end_streams.remote(), DRAIN_CALL_S)
            await asyncio.sleep(_POLL_S)
    except (RayError, RayServeException, TimeoutError) as error:
        log.debug("draining: %s", error)  # there is nothing to drain, or nobody to do it


def _within(gcs: str, seconds: float, action: Callable[[], None]) -> None:
    """Run it; go on without it when it takes longer, or when Ray's GCS is dead and it would wait in vain.

    A signal to the whole process group, as `timeout` and service managers send it, reaches Ray's daemons too.
    """
    host, _, port = gcs.rpartition(":")
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline and listens(host.strip("[]"), int(port)):
        thread.join(_POLL_S)


def _expect(condition: Callable[[], bool], otherwise: str) -> None:
    if not wait_until(condition, DOOR_S):
        raise ConfigurationError(f"{otherwise}, {DOOR_S:g} s after the model was ready", code="deploy_failed")


def _running() -> bool:
    app = serve.status().applications.get(NAME)
    if app is None:
        return False
    if app.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        raise ConfigurationError(_reason(app), code="deploy_failed")
    return bool(app.status == "RUNNING")


def _reason(app: Any) -> str:
    """The last line of the trace that Serve keeps: our own error, if it was one."""
    messages = [deployment.message for deployment in app.deployments.values() if deployment.message]
    lines = [line.strip() for line in "\n".join(messages or [app.message]).splitlines() if line.strip()]
    ours = [line for line in lines if re.match(r"(motley\.|[\w.]*Error)\S*: ", line)]
    return re.sub(r"^motley\.[\w.]+: ", "", (ours or lines or ["the service did not start"])[-1])


def _haproxy_statistics() -> str:
    path = os.environ.get(_HAPROXY)
    if path is None:
        return ""
    folder, name = os.path.split(path)
    return statistics(Path(folder, ray.get_runtime_context().get_node_id(), name))  # Serve has a folder for each node


def _get(url: str | urllib.request.Request) -> str:
    """The body of a good answer, or nothing."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, OSError):
        return ""
