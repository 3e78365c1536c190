"""Join of a Ray cluster that was started by others, and checks of its nodes before anything is deployed."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ...ray_compat.environment import AUTH_MODE, HAPROXY
from ...ray_compat.local_node import token_is_required
from ...routing.ingress_broadcast import APPLICATION
from ...security.edge.ports import is_listening
from ...service_errors import ConfigurationError
from .ray_settings import RaySetting, node_settings

SHUTDOWN_TIMEOUT_S = 5.0
NODE_TIMEOUT_S = 60.0  # a node may have to start a process for it
NodeEnvironment = Mapping[str, str | None]  # settings of a node's processes, by name


@contextmanager
def join_cluster(address: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Connect this process to the Ray cluster at `address`, with the environment variables of its processes."""
    _check_listens(address)
    assert "ray.serve" not in sys.modules, "Serve reads its settings when it is imported, which comes later"
    os.environ.update({**environment, AUTH_MODE: "token"})  # which Ray reads when it is imported
    import ray
    import ray.serve

    try:
        ray.init(address=address, namespace=APPLICATION, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"--address {address}: {reason}", param="address", code="no_cluster") from None
    try:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        yield
    finally:
        _shut_down(ray.shutdown)


def _check_listens(address: str) -> None:
    """Raise ConfigurationError if nobody listens at the address: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and not is_listening(host.strip("[]"), int(port)):
        message = f"--address {address}: nobody listens there; expected that of a Ray head node, or auto"
        raise ConfigurationError(message, param="address", code="no_cluster")


def _shut_down(shutdown: Callable[[], None]) -> None:
    """Disconnect, waiting SHUTDOWN_TIMEOUT_S at most: the cluster goes on without this process."""
    thread = threading.Thread(target=shutdown, daemon=True)
    thread.start()
    thread.join(SHUTDOWN_TIMEOUT_S)
    atexit.unregister(shutdown)


def check_nodes() -> None:
    """Check the nodes within `join_cluster`. Raises ConfigurationError with the remedy if a node was not started as it
    must be.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    required = node_settings()
    # Its process ends after one call, and is not taken for an actor.
    read_environment = ray.remote(num_cpus=0, max_calls=1)(_read_environment)
    names = [*(setting.name for setting in required), HAPROXY]
    reads = [
        read_environment.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            names
        )
        for node in nodes
    ]
    try:
        environments: list[NodeEnvironment] = ray.get(reads, timeout=NODE_TIMEOUT_S)
    except (RayError, GetTimeoutError) as error:
        reason = " ".join(str(error).split())[-200:]
        message = f"its nodes cannot be looked at: {reason}; install the same Motley, Ray and Python on every node"
        raise ConfigurationError(message, param="address", code="bad_cluster") from None
    hosts = [str(node["NodeManagerHostname"]) for node in nodes]
    bad = missing_setting(required, list(zip(hosts, environments, strict=True)))
    if bad is not None:
        raise ConfigurationError(bad, param="address", code="bad_cluster")


def missing_setting(required: Sequence[RaySetting], nodes: Iterable[tuple[str, NodeEnvironment]]) -> str | None:
    """Return what the first wrong node lacks, with the remedy; None if all nodes are right."""
    for host, environment in nodes:
        if environment.get(AUTH_MODE) != "token":
            return f"node {host} lets everyone in: start Ray with {AUTH_MODE}=token on every node"
        if environment.get(HAPROXY) == "1":
            return f"node {host} has {HAPROXY}=1: start Ray without it, HAProxy is for services on one machine"
        missing = [
            setting for setting in required if environment.get(setting.name) not in (setting.value, *setting.former)
        ]
        if missing:
            said = " ".join(f"{setting.name}={shlex.quote(setting.value)}" for setting in missing)
            return f"node {host} lacks settings that Serve reads when Ray starts. Start Ray on every node with: {said}"
    return None


def _read_environment(names: list[str]) -> dict[str, str | None]:
    """Return settings of the process that runs this. It runs on a node, in a process of Ray's."""
    mode = "token" if token_is_required() else "disabled"
    return {**{name: os.environ.get(name) for name in names}, AUTH_MODE: mode}
