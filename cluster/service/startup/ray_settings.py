"""Settings that Ray and Serve read from the environment once, when they start. One table: name, value, reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...ray_compat import environment as ray_env
from ...security.edge.haproxy_admin import launcher
from ...security.edge.haproxy_config import BUFFER_BYTES, HAProxyEdge
from ...security.edge.ports import free_port_block
from ...security.edge.serve_patches import CHECK, FORMER_HOOK, HOOK, INSTALL, SPREAD
from ...service_errors import ConfigurationError
from ...transport.incoming_bodies import MAX_MESSAGE_BYTES
from ..warm_workers.warm_worker import PRELOADED
from .grpc_environment import EXPERIMENTS, grpc_experiments

DIRECT_PORTS = 50  # one for each replica of the ingress, and those that Serve keeps back for a while
MAX_REPLY_BYTES = 64 * 2**20  # between ingress and replica: log-probabilities of a long prompt
_OF_NODES = {
    ray_env.CALLS_BY_GRPC, ray_env.MAX_REQUEST_BYTES, ray_env.MAX_REPLICA_REPLY_BYTES,
    ray_env.MIN_INGRESS_DRAIN_S, ray_env.PROXY_HOOK,
    "FORWARDED_ALLOW_IPS", ray_env.HIDE_GPUS_FROM_OTHERS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RaySetting:
    name: str
    value: str
    reason: str
    former: tuple[str, ...] = ()  # values of earlier versions, which do the same


def ray_settings(folder: Path, edge: HAProxyEdge | None) -> tuple[RaySetting, ...]:
    """Return the settings for a cluster that keeps its files in `folder`; HAProxy is used if there is an edge for
    it.
    """
    return (*_shared(), *(() if edge is None else _haproxy(folder, edge)))


def node_settings() -> tuple[RaySetting, ...]:
    """Return the settings for every node of a cluster that others start. HAProxy is not used there."""
    everywhere = tuple(setting for setting in _shared() if setting.name in _OF_NODES)
    return (*everywhere, RaySetting(SPREAD, "1", "replicas call one another by their nodes' addresses"))


def _shared() -> tuple[RaySetting, ...]:
    http, grpc, fallback = free_port_block(DIRECT_PORTS), free_port_block(DIRECT_PORTS), free_port_block(2)
    own = "Serve would share a gRPC port with another service of this machine, and with it its calls"
    return (
        RaySetting(ray_env.FIRST_INGRESS_HTTP_PORT, str(http), own),
        RaySetting(ray_env.LAST_INGRESS_HTTP_PORT, str(http + DIRECT_PORTS - 1), own),
        RaySetting(ray_env.FIRST_INGRESS_GRPC_PORT, str(grpc), own),
        RaySetting(ray_env.LAST_INGRESS_GRPC_PORT, str(grpc + DIRECT_PORTS - 1), own),
        RaySetting(ray_env.CALLS_BY_GRPC, "1", "replica calls by gRPC: streams 4 times faster"),
        RaySetting(ray_env.MAX_REQUEST_BYTES, str(MAX_MESSAGE_BYTES), "2 GiB by default"),
        RaySetting(ray_env.MAX_REPLICA_REPLY_BYTES, str(MAX_REPLY_BYTES), "4 MiB is less than a reply may be"),
        RaySetting(
            EXPERIMENTS, grpc_experiments(os.environ), "a third less CPU for each message that is read of a stream"
        ),
        RaySetting(ray_env.CONTROL_LOOP_PERIOD_S, "0.3", "at 0.1 an idle service takes 3% of a core more"),
        RaySetting(ray_env.METRICS_PERIOD_MS, "1000", "likewise, of each replica; they are read every 10 s"),
        RaySetting(ray_env.MIN_INGRESS_DRAIN_S, "1", "else shutdown takes 32 s"),
        RaySetting(ray_env.PROXY_START_TIMEOUT_S, "60", "at 5 Serve kills the proxy that its start waits for"),
        RaySetting(ray_env.PROXY_CHECK_PERIOD_S, "2", "thrice as long until one that is dead is started again"),
        RaySetting(ray_env.BEYOND_THIS_MACHINE, "0", "of one machine: Ray's ports are on loopback"),
        RaySetting(ray_env.START_RAY_ON_CALLS, "0", "a call after Ray has ended would start another Ray"),
        RaySetting(ray_env.PROXY_HOOK, HOOK, "Serve's own paths and RPCs want no key", (FORMER_HOOK,)),
        RaySetting(ray_env.REPLICAS_LOG_TO_STDERR, "0", "replicas log to their files"),
        RaySetting("FORWARDED_ALLOW_IPS", "", "uvicorn otherwise believes X-Forwarded-For"),
        RaySetting(ray_env.PROXY_HTTP_PORT, str(fallback), "two services that start at once share none"),
        RaySetting(ray_env.PROXY_GRPC_PORT, str(fallback + 1), "likewise"),
        RaySetting(ray_env.WORKER_NICENESS, "0", "15 by default: any other process would stall the streams"),
        RaySetting(ray_env.WORKERS_AT_START, "0", "one for each of Ray's logical CPUs, which are many here"),
        RaySetting(ray_env.PRELOADED_MODULES, _preloaded(os.environ), "some wait for replicas (warm_workers/)"),
        RaySetting(ray_env.USAGE_REPORTS, "0", "nothing is reported to anyone"),
        RaySetting(ray_env.HIDE_GPUS_FROM_OTHERS, "0", "a replica without GPUs must not lose sight of them"),
    )


def _preloaded(environ: Mapping[str, str]) -> str:
    others = [name for name in environ.get(ray_env.PRELOADED_MODULES, "").split(",") if name not in ("", PRELOADED)]
    return ",".join([*others, PRELOADED])


def _haproxy(folder: Path, edge: HAProxyEdge) -> tuple[RaySetting, ...]:
    own = "the default path is shared by all clusters of a machine"
    return (
        RaySetting(ray_env.HAPROXY, "1", "streams 15 times faster than Serve's own proxy; cancels arrive"),
        RaySetting(ray_env.HAPROXY_BINARY, str(launcher(folder, edge.write(folder))), "its configuration is edited"),
        RaySetting(CHECK, edge.check, "HAProxy alone may ask Serve for its health"),
        RaySetting(ray_env.HAPROXY_BUFFER_BYTES, str(BUFFER_BYTES), "so that long heads can be told from broken ones"),
        RaySetting(
            ray_env.HAPROXY_MAX_CONNECTIONS, str(max_connections()), "idle connections must not keep others out"
        ),
        RaySetting(ray_env.HAPROXY_CONFIG_FILE, str(folder / "haproxy.cfg"), own),
        RaySetting(ray_env.HAPROXY_ADMIN_SOCKET, str(folder / "admin.sock"), own),
        RaySetting(ray_env.HAPROXY_METRICS_SOCKET, str(folder / "metrics.sock"), own),
        RaySetting(ray_env.HAPROXY_STATE_FOLDER, str(folder), own),
        RaySetting(ray_env.HAPROXY_STATE_FILE, str(folder / "server-state"), own),
        RaySetting(
            ray_env.CONTROLLER_HOOK,
            INSTALL,
            "a HAProxy that is lost is back at once (security/edge/)",
        ),
        RaySetting(ray_env.HAPROXY_HARD_STOP_S, str(24 * 3600), "a reload must not cut streams, however long"),
        RaySetting(ray_env.PORT_QUARANTINE_S, "60", "by default as long; who asks at an old port finds an ingress"),
    )


def max_connections() -> int:
    """Return how many connections HAProxy can have file descriptors for, at two and a half each; at most 16,384."""
    import resource  # there is none on Windows, and no HAProxy

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files == resource.RLIM_INFINITY:
        return 16_384
    return min(max((files - 1024) * 2 // 5, 1024), 16_384)


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if the environment would leave Ray's ports open to strangers."""
    if environ.get(ray_env.AUTH_MODE, "token").lower() != "token":
        raise ConfigurationError(
            f"{ray_env.AUTH_MODE}={environ[ray_env.AUTH_MODE]} leaves Ray's own ports open to everyone; unset it",
            param=ray_env.AUTH_MODE,
            code="ray_auth_disabled",
        )
