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
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import grpc
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from .app import NAME, build_app
from .failures import ConfigurationError
from .haproxy import open_requests, replicas_up
from .options import ServeOptions
from .ports import bracketed, first_free, listens
from .processes import wait_until
from .protos import inference_pb2 as pb
from .protos import inference_pb2_grpc
from .servicers import SERVICER_FUNCTIONS

log = logging.getLogger(__name__)

DASHBOARD_PORT = 8265
OBJECT_STORE_BYTES = 128 * 2**20  # messages travel by value; Ray would take 30% of memory
DOOR_S = 60.0  # from a model that is ready to doors that answer; seconds are usual
SERVE_END_S = 4.0  # what Serve needs to end when no stream is left, and half as much again
DRAIN_CALL_S = 1.0
RAY_END_S = 5.0
_POLL_S = 0.05
_HAPROXY_METRICS = "RAY_SERVE_HAPROXY_METRICS_PORT"  # set by settings.py when there is one


def start_ray(folder: Path, options: ServeOptions) -> str:
    """Start a new cluster, never join one. Returns the dashboard's address."""
    context = ray.init(
        address="local",
        num_cpus=max(options.replicas, os.cpu_count() or 1),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=options.dashboard_port or first_free("127.0.0.1", DASHBOARD_PORT),
        logging_level=logging.ERROR,
        log_to_driver=False,
        namespace=NAME,
        _temp_dir=str(folder),
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return str(context.dashboard_url)


def deploy(model: str, options: ServeOptions, make_worker: Any = None) -> None:
    """Start Serve's proxies and the application; returns before it is ready."""
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": options.host, "port": options.http_port},
        grpc_options={"port": options.grpc_port, "grpc_servicer_functions": list(SERVICER_FUNCTIONS)},
    )
    serve._run(build_app(model, options, make_worker), name=NAME, route_prefix="/", _blocking=False)


def wait_ready(options: ServeOptions) -> str:
    """Wait until the model answers on both doors; its name. Raises ConfigurationError if it cannot start."""
    wait_until(_running)  # as long as a model takes to load
    health = f"http://{bracketed(options.host)}:{options.http_port}/health"
    _expect(lambda: bool(_get(health)), f"{health} does not answer")
    if _HAPROXY_METRICS in os.environ:
        # Until HAProxy knows the ingress it uses Serve's own proxy, which is slow and loses cancellations.
        _expect(lambda: replicas_up(_haproxy_metrics()) >= len(("http", "grpc")), "HAProxy does not see the ingress")
    with grpc.insecure_channel(f"{bracketed(options.host)}:{options.grpc_port}") as channel:
        model = inference_pb2_grpc.InferenceStub(channel).GetModel(
            pb.GetModelRequest(), wait_for_ready=True, timeout=30
        )
        return str(model.name)


def stop(drain_s: float) -> None:
    """Let streams end for `drain_s` at most, then end Serve and Ray."""
    if not ray.is_initialized():
        return
    # Ray tells the planned end of Serve's controller as an error, on stdout.
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        # Serve's own draining ends HAProxy first, and so every stream with it.
        _within(drain_s + DRAIN_CALL_S, lambda: asyncio.run(_drain(time.monotonic() + drain_s)))
        _within(SERVE_END_S, serve.shutdown)
        _within(RAY_END_S, ray.shutdown)
    atexit.unregister(ray.shutdown)  # it would wait for daemons that are no more


async def _drain(deadline: float) -> None:
    """Refuse new requests; return when no stream is left, neither in the ingress nor on its way to a client.

    A coroutine, since Serve's handles want a running loop.
    """
    try:
        ingress = serve.get_app_handle(NAME)
        while await asyncio.wait_for(ingress.drain.remote(), DRAIN_CALL_S) or open_requests(_haproxy_metrics()):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(_POLL_S)
    except (RayError, RayServeException, TimeoutError) as error:
        log.debug("draining: %s", error)  # there is nothing to drain, or nobody to do it


def _within(seconds: float, action: Callable[[], None]) -> None:
    """Run it; go on without it when it takes longer, or when Ray is dead and it would wait in vain.

    A signal to the whole process group, as `timeout` and service managers send it, reaches Ray's daemons too.
    """
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
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


def _haproxy_metrics() -> str:
    port = os.environ.get(_HAPROXY_METRICS)
    return "" if port is None else _get(f"http://127.0.0.1:{port}/metrics")


def _get(url: str) -> str:
    """The body of a good answer, or nothing."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, OSError):
        return ""
