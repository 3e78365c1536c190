"""Tokenizer in a process of its own, which can be ended: for files and templates whose time and memory are not bounded.

Each text has a process, forked from one that has loaded the tokenizer, with limits of the operating system on its
time and memory. The process has low priority, so that texts that are read in the ordinary way go first.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ... import errors
from ...errors import CheckpointError, InvalidRequest, MotleyError, Overloaded, Unavailable
from ...host.child_frames import encode_frame, receive_frame
from ...host.forkserver import Forkserver, ProcessLost, WatchedConnection, retry_once
from ...host.tenant_queue import TenantQueue
from ..jinja.bounded_template import plain_dict

Made = TypeVar("Made")

MAX_RUNNING = 2  # texts that are read at a time
MAX_WAITING = 256
TENANT_SHARE = 0.5  # share of MAX_WAITING for one tenant
START_S = 120.0  # most seconds for imports and loading the tokenizer, on a busy machine
WALL_S = 60.0  # elapsed seconds, more than the process's own limits allow
# Threads would not survive the forks, and the process needs no device.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(eq=False, slots=True)
class _QueuedText:
    request: bytes
    too_much: InvalidRequest
    ids: Future[list[int]] = field(default_factory=Future)


class TokenizerProcess:
    """Tokenizer of a checkpoint's folder, in other processes. Starts nothing before it is needed; safe to use from
    threads.

    component: the doubtful component of the file, which the error names if loading exceeds its limits.

    Tenants take turns; a waiting text holds no thread, and one whose caller has left is skipped.
    """

    def __init__(self, folder: Path, component: str = "") -> None:
        self._folder = folder
        self._component = component
        self._lock = threading.Lock()
        self._forkserver: _TokenizerForkserver | None = None
        self._line_lock = threading.Lock()
        self._line: TenantQueue[_QueuedText] = TenantQueue()
        self._threads = ThreadPoolExecutor(MAX_RUNNING, "motley-aside")

    def start(self) -> None:
        """Load the tokenizer in another process, and let it read a short text. Raises CheckpointError if that exceeds
        its limits.
        """
        self._in_forkserver(lambda forkserver: None)

    def begin(
        self, method: str, arguments: dict[str, Any], *, tenant: str, param: str, too_much: InvalidRequest
    ) -> Future[list[int]]:
        """Return a future of what Tokenizer's `encode` or `chat` returns or raises; `too_much` is raised if the process
        exceeds its limits of time and memory.

        Raises Overloaded naming `param` when too many texts wait, of this tenant or of all.
        """
        text = _QueuedText(
            json.dumps({"method": method, "arguments": arguments}, default=plain_dict).encode(), too_much
        )
        with self._line_lock:
            self._check_capacity(tenant, param)
            self._line.put(tenant, text)
        self._threads.submit(self._read_next)
        return text.ids

    def _check_capacity(self, tenant: str, param: str) -> None:
        own, max_waiting = self._line.of(tenant), int(MAX_WAITING * TENANT_SHARE)
        if own >= max_waiting or len(self._line) >= MAX_WAITING:
            count = f"{own} texts of yours" if own >= max_waiting else f"{MAX_WAITING} texts"
            message = f"{param}: {count} wait that take this model's tokenizer long"
            raise Overloaded(message, param=param, code="queue_full")

    def _read_next(self) -> None:
        """Read one waiting text; this is called once for each text in the queue."""
        with self._line_lock:
            text = self._line.take()
        if text is None or not text.ids.set_running_or_notify_cancel():
            return
        try:
            reply = self._in_forkserver(lambda forkserver: forkserver.call(text.request))
            if reply is None:
                raise text.too_much
            if "error" in reply:
                raise _rebuild_error(reply["error"])
            text.ids.set_result(list(map(int, reply["ids"])))
        except BaseException as error:  # noqa: BLE001 - it is for who waits
            text.ids.set_exception(error)

    def _in_forkserver(self, work: Callable[[_TokenizerForkserver], Made]) -> Made:
        """Do work with the running forkserver; once more, with a new one, if a process was stopped. Raises
        Unavailable.
        """
        try:
            return retry_once(lambda: work(self._running()))
        except ProcessLost as lost:
            message = f"the process that reads such texts was lost twice: {lost}; it is started again"
            raise Unavailable(message, code="tokenizer_lost") from None

    def _running(self) -> _TokenizerForkserver:
        with self._lock:
            if self._forkserver is None or not self._forkserver.alive:
                self._forkserver = _TokenizerForkserver(self._folder, self._component)
                weakref.finalize(self, self._forkserver.close)
            return self._forkserver


class _TokenizerForkserver(Forkserver):
    """Process that the texts' processes are forked from. Raises CheckpointError if the tokenizer cannot be loaded, and
    Lost if the process is stopped meanwhile.
    """

    def __init__(self, folder: Path, component: str) -> None:
        # Its stderr is where the library writes of its panics, at length.
        super().__init__(f"{__package__}.tokenizer_forkserver", [str(folder)], _ENVIRONMENT, quiet=True)
        try:
            reply = _receive_reply(self.line(START_S))
        except ProcessLost:
            self.close()
            raise
        if reply is None or "error" in reply:
            self.close()
            if reply is None:
                message = "takes more time or memory to load than a tokenizer may"
                raise CheckpointError(message, file="tokenizer.json", tensor=component)
            raise _rebuild_error(reply["error"])

    def call(self, request: bytes) -> dict[str, Any] | None:
        """Return the answer of a new process; None if a limit has ended it. Raises ProcessLost if it was stopped."""
        connection, watched = self.child()
        with connection:
            line = WatchedConnection(connection, watched, WALL_S)
            try:
                line.sendall(encode_frame(0, payload=request))
            except OSError:
                return None
            return _receive_reply(line)


def _receive_reply(line: WatchedConnection) -> dict[str, Any] | None:
    try:
        received = receive_frame(line)
    except OSError:  # a timeout too
        return None
    if received is None:
        return None
    reply: dict[str, Any] = json.loads(received[2])
    return reply


def _rebuild_error(said: dict[str, Any]) -> MotleyError:
    kind = getattr(errors, said["kind"])
    if kind is CheckpointError:
        return CheckpointError(said["message"], file=said["file"], tensor=said["tensor"])
    error: MotleyError = kind(said["message"], param=said["param"], code=said["code"])
    return error
