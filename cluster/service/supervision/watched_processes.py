"""Processes of Ray, of Serve and of the service that `motley serve` watches, and how each is asked."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ...fleet.control.control_actor import ControlActor
from ...fleet.control.control_launcher import NAME as CONTROL
from ...prefix_store.embedded_redis import EmbeddedRedis
from ...process_tree import descendants, is_stopped
from ...ray_compat.local_node import node_daemons, open_channel
from ...ray_compat.serve_controller import check_controller
from ...ray_compat.visible_names import (
    AUTOSCALING_MONITOR,
    CLIENT_SERVER,
    DASHBOARD,
    GCS,
    LOG_MONITOR,
    RAYLET,
    actor_title,
    controller_title,
)
from ...routing.ingress_broadcast import APPLICATION
from ...security.edge.internal_client import InternalClient
from .watchdog import ChildProcess, ProbedProcess

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 3.0
RAY_TIMEOUT_S = 11.0  # with the drain and the end of all, less than half a minute from the fault on a busy machine
RESTART_TIMEOUT_S = 25.0  # of what is started again: a start takes seconds, on a busy machine many
# By Ray's name of the process. What is not here is vital, as a Ray of another version may have other ones.
NOT_VITAL = {
    DASHBOARD: ("Ray's dashboard", "its pages are gone"),
    AUTOSCALING_MONITOR: ("Ray's monitor of autoscaling", "nothing here needs it"),
    LOG_MONITOR: ("Ray's log monitor", "the dashboard shows no new lines of logs"),
    CLIENT_SERVER: ("Ray's server of remote drivers", "nothing here needs it"),
}
VITAL = {GCS: "Ray's GCS", RAYLET: "Ray's raylet"}
BY_ITSELF = {RAYLET: "as it does without its dashboard agent or its runtime-env agent"}


def ray_children() -> list[ChildProcess]:
    """Return the daemons that Ray's start has left as children of this process."""
    return [
        ChildProcess(NOT_VITAL[kind][0], process, so=NOT_VITAL[kind][1])
        if kind in NOT_VITAL
        else ChildProcess(VITAL.get(kind, f"Ray's {kind}"), process, vital=True, so=BY_ITSELF.get(kind, ""))
        for kind, processes in node_daemons().items()
        for process in processes
    ]


def ray_probes() -> list[ProbedProcess]:
    """Return Ray's daemons that may hang."""
    [node] = ray.nodes()
    raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    gcs = str(ray.get_runtime_context().gcs_address)
    return [
        ProbedProcess("Ray's GCS", grpc_health_probe(gcs), RAY_TIMEOUT_S, certain=partial(any_stopped, GCS)),
        ProbedProcess("Ray's raylet", grpc_health_probe(raylet), RAY_TIMEOUT_S, certain=partial(any_stopped, RAYLET)),
    ]


def service_probes(inside: InternalClient, redis: EmbeddedRedis | None, *, control: bool) -> list[ProbedProcess]:
    """Return the processes of a ready service that must answer. `inside`: the address of its ports."""
    host, _, port = inside.http.removeprefix("http://").rpartition(":")
    found = [
        ProbedProcess("the HTTP port", partial(check_port_open, host.strip("[]"), int(port)), RESTART_TIMEOUT_S),
        _actor("Serve's controller", partial(check_controller, PROBE_TIMEOUT_S), controller_title()),
    ]
    if control:
        plane = _actor("the control plane", _probe_control_plane, actor_title(ControlActor.__name__))
        found.append(replace(plane, vital=False))
    if redis is not None:
        stopped = redis.is_stopped
        found.append(
            ProbedProcess(redis.name, redis.ping, RESTART_TIMEOUT_S, redis.restart_hung, vital=False, certain=stopped)
        )
    return found


def grpc_health_probe(address: str) -> Callable[[], object]:
    """Return a function that probes one of Ray's servers by gRPC's health protocol.

    It opens a new connection each time: if one is open when Ray ends, grpcio writes an error to stderr.
    """

    def probe() -> object:
        with open_channel(address) as channel:
            try:
                return health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S
                )
            except grpc.RpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                return error  # it lives, and has an opinion

    return probe


def check_port_open(host: str, port: int) -> None:
    """Raise ConnectionRefusedError if nobody listens. A port with a long queue counts as open."""
    try:
        socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        raise
    except OSError as error:
        log.debug("HAProxy has not answered in time: %s", error)


def _probe_control_plane() -> object:
    return ray.get(ray.get_actor(CONTROL, APPLICATION).ready.remote(), timeout=PROBE_TIMEOUT_S)


def _actor(name: str, probe: Callable[[], object], title: str) -> ProbedProcess:
    """Return the watch of a Ray actor, which Ray restarts when it ends. `ask` looks it up by name each time, as handles
    go stale.
    """

    def stopped() -> bool:
        return any(map(is_stopped, processes_titled(title)))

    return ProbedProcess(name, probe, RESTART_TIMEOUT_S, partial(kill_titled, title), certain=stopped)


def any_stopped(kind: str) -> bool:
    """Return whether a signal has stopped a process of this kind, by Ray's name."""
    return any(is_stopped(process.pid) for process in node_daemons().get(kind, ()))


def processes_titled(title: str) -> list[int]:
    """Return the descendants whose command line begins with this title."""
    found = []
    for pid in descendants():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                found.append(pid)
    return found


def kill_titled(title: str) -> None:
    """Send SIGKILL to the descendants with this title."""
    for pid in processes_titled(title):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
