"""Settings that Ray and Serve read from the environment once, when they start. One table: name, value, reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
    "RAY_SERVE_THROUGHPUT_OPTIMIZED", "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
    "FORWARDED_ALLOW_IPS", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
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
        RaySetting("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", str(http), own),
        RaySetting("RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT", str(http + DIRECT_PORTS - 1), own),
        RaySetting("RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT", str(grpc), own),
        RaySetting("RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT", str(grpc + DIRECT_PORTS - 1), own),
        RaySetting("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1", "replica calls by gRPC: streams 4 times faster"),
        RaySetting("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(MAX_MESSAGE_BYTES), "2 GiB by default"),
        RaySetting(
            "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(MAX_REPLY_BYTES), "4 MiB is less than a reply may be"
        ),
        RaySetting(
            EXPERIMENTS, grpc_experiments(os.environ), "a third less CPU for each message that is read of a stream"
        ),
        RaySetting("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3", "at 0.1 an idle service takes 3% of a core more"),
        RaySetting(
            "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "1000", "likewise, of each replica; they are read every 10 s"
        ),
        RaySetting("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1", "else shutdown takes 32 s"),
        RaySetting(
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60", "at 5 Serve kills the proxy that its start waits for"
        ),
        RaySetting(
            "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "2", "thrice as long until one that is dead is started again"
        ),
        RaySetting("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0", "of one machine: Ray's ports are on loopback"),
        RaySetting("RAY_ENABLE_AUTO_CONNECT", "0", "a call after Ray has ended would start another Ray"),
        RaySetting(
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", HOOK, "Serve's own paths and RPCs want no key", (FORMER_HOOK,)
        ),
        RaySetting("RAY_SERVE_LOG_TO_STDERR", "0", "replicas log to their files"),
        RaySetting("FORWARDED_ALLOW_IPS", "", "uvicorn otherwise believes X-Forwarded-For"),
        RaySetting("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", str(fallback), "two services that start at once share none"),
        RaySetting("RAY_SERVE_FALLBACK_PROXY_GRPC_PORT", str(fallback + 1), "likewise"),
        RaySetting("RAY_worker_niceness", "0", "15 by default: any other process would stall the streams"),
        RaySetting("RAY_prestart_worker_first_driver", "0", "one for each of Ray's logical CPUs, which are many here"),
        RaySetting("RAY_preload_python_modules", _preloaded(os.environ), "some wait for replicas (warm_workers/)"),
        RaySetting("RAY_USAGE_STATS_ENABLED", "0", "nothing is reported to anyone"),
        RaySetting("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0", "a replica without GPUs must not lose sight of them"),
    )


def _preloaded(environ: Mapping[str, str]) -> str:
    others = [name for name in environ.get("RAY_preload_python_modules", "").split(",") if name not in ("", PRELOADED)]
    return ",".join([*others, PRELOADED])


def _haproxy(folder: Path, edge: HAProxyEdge) -> tuple[RaySetting, ...]:
    own = "the default path is shared by all clusters of a machine"
    return (
        RaySetting("RAY_SERVE_ENABLE_HA_PROXY", "1", "streams 15 times faster than Serve's own proxy; cancels arrive"),
        RaySetting(
            "RAY_SERVE_HAPROXY_BINARY_PATH", str(launcher(folder, edge.write(folder))), "its configuration is edited"
        ),
        RaySetting(CHECK, edge.check, "HAProxy alone may ask Serve for its health"),
        RaySetting(
            "RAY_SERVE_HAPROXY_TUNE_BUFSIZE", str(BUFFER_BYTES), "so that long heads can be told from broken ones"
        ),
        RaySetting("RAY_SERVE_HAPROXY_MAXCONN", str(max_connections()), "idle connections must not keep others out"),
        RaySetting("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(folder / "haproxy.cfg"), own),
        RaySetting("RAY_SERVE_HAPROXY_SOCKET_PATH", str(folder / "admin.sock"), own),
        RaySetting("RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH", str(folder / "metrics.sock"), own),
        RaySetting("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", str(folder), own),
        RaySetting("RAY_SERVE_HAPROXY_SERVER_STATE_FILE", str(folder / "server-state"), own),
        RaySetting(
            "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH",
            INSTALL,
            "a HAProxy that is lost is back at once (security/edge/)",
        ),
        RaySetting(
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", str(24 * 3600), "a reload must not cut streams, however long"
        ),
        RaySetting("RAY_SERVE_PORT_QUARANTINE_S", "60", "by default as long; who asks at an old port finds an ingress"),
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
    if environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        raise ConfigurationError(
            f"RAY_AUTH_MODE={environ['RAY_AUTH_MODE']} leaves Ray's own ports open to everyone; unset it",
            param="RAY_AUTH_MODE",
            code="ray_auth_disabled",
        )
