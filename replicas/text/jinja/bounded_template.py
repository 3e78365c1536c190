"""Templates whose time and memory are bounded: each is rendered in a process that its limits end.

The process is started for the template's first rendering and serves the following ones too, until one exceeds a limit.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import jinja2

from ...host.child_frames import encode_frame, receive_frame
from ...host.forkserver import ProcessLost, WatchedConnection, retry_once
from ...host.watched_process import WatchedProcess
from .template_meter import TemplateLimit, TemplateTimeout
from .template_process import TemplateReply, compile_template
from .template_sandbox import TemplateRefusal, render_text
from .template_variables import expected_names

__all__ = ["COMPILE_FAULTS", "BoundedTemplate", "TemplateLimit", "TemplateRefusal", "TemplateTimeout", "plain_dict"]

MAX_SOURCE = 1_000_000  # characters; those of well-known models have up to 20,000
WALL_S = 60.0  # elapsed seconds of one rendering, more than its CPU time takes on a busy machine
# Errors that compiling may raise; the last four come from deep nesting, or from numbers of thousands of digits.
COMPILE_FAULTS = (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError)
_ERRORS: dict[int, type[Exception]] = {
    TemplateReply.LIMIT: TemplateLimit,
    TemplateReply.RECURSION: RecursionError,
    TemplateReply.REFUSAL: TemplateRefusal,
    TemplateReply.FAULT: jinja2.TemplateRuntimeError,
    TemplateReply.OTHER: RuntimeError,
}


class BoundedTemplate:
    """A compiled template; `variables` are the names that it expects to be given. Safe to use from several threads.

    own_process: render in a process of its own; otherwise in the caller's, which must itself be limited.

    Raises one of COMPILE_FAULTS.
    """

    def __init__(self, source: str, *, max_seconds: float, max_chars: int, own_process: bool = True) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateLimit(f"it is longer than {MAX_SOURCE} characters")
        self._template = compile_template(source)
        environment = self._template.environment
        self.variables = expected_names(environment.parse(source)) - environment.globals.keys()
        self._max_seconds = max_seconds
        self._max_chars = max_chars
        self._own_process = own_process
        self._setup = json.dumps({"source": source, "max_chars": max_chars}).encode()
        self._lock = threading.Lock()
        self._process: _TemplateProcess | None = None

    def render(self, values: Mapping[str, Any], max_seconds: float | None = None) -> str:
        """Return the rendered text. `max_seconds`: a time limit below the template's usual one; None: the usual one.
        Time is CPU time: a template never waits, and a busy machine is not its fault.

        Raises TemplateLimit, TemplateRefusal, RecursionError, or jinja2.TemplateRuntimeError with the words of another
        error that the template ran into.
        """
        if not self._own_process:
            return render_text(self._template, values, self._max_chars)
        seconds = self._max_seconds if max_seconds is None else min(max_seconds, self._max_seconds)
        request = json.dumps({"values": values, "seconds": seconds}, default=plain_dict).encode()
        with self._lock:
            try:
                return retry_once(lambda: self._render(request, seconds))
            except ProcessLost as lost:
                raise TemplateLimit(f"the process that renders it was lost twice: {lost}") from None

    def rest(self) -> None:
        """End the template's process. It is started again for a rendering."""
        with self._lock:
            self._close()

    def _render(self, request: bytes, seconds: float) -> str:
        """Return the rendered text. Raises ProcessLost if the process was stopped or ended before its time was over."""
        began = time.monotonic()
        try:
            line = self._running().line(WALL_S)
            line.sendall(encode_frame(0, payload=request))
            received = receive_frame(line)
        except ProcessLost:
            self._close()
            raise
        except OSError:  # a timeout too
            received = None
        if received is not None and received[0] == TemplateReply.TEXT:
            return received[2].decode(errors="surrogatepass")
        if received is None or received[0] in (TemplateReply.LIMIT, TemplateReply.TIMEOUT):
            self._close()
        if received is None and time.monotonic() - began < seconds / 2:
            raise ProcessLost("the process that renders a chat template has ended")
        if received is None or received[0] == TemplateReply.TIMEOUT:
            raise TemplateTimeout(f"rendering took longer than {seconds:g} s")
        raise _ERRORS[received[0]](received[2].decode(errors="surrogatepass"))

    def _running(self) -> _TemplateProcess:
        if self._process is None:
            self._process = _TemplateProcess(self._setup)
        return self._process

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None


class _TemplateProcess:
    """Process that renders one template; it ends when its socket does."""

    def __init__(self, setup: bytes) -> None:
        """Start it, and send it the template. Raises OSError if there is no process to be had."""
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.template_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._watched = WatchedProcess(self._process.pid)
        self._connection.sendall(encode_frame(0, payload=setup))

    def line(self, wall_s: float) -> WatchedConnection:
        return WatchedConnection(self._connection, self._watched, wall_s)

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


def plain_dict(value: Any) -> dict[str, Any]:
    """Return a mapping as a dict, for JSON: messages may be mappings of any kind."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be part of a message")
