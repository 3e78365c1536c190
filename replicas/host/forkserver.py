"""Processes that are forked from one which has imported and loaded what they need: both ends of it.

A process of either kind that is stopped (SIGSTOP) is ended and counts as lost, while one that only takes long does not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from .child_frames import GrammarReply, encode_frame, receive_frame
from .watched_process import POLL_S, WatchedProcess

log = logging.getLogger(__name__)

Made = TypeVar("Made")

FORK_TIMEOUT_S = 40.0  # most seconds that a fork may take, on a busy machine


class ProcessLost(Exception):
    """Error for work whose process was stopped, or could not be forked: through no fault of the work, which may be
    tried once more.
    """


def retry_once(work: Callable[[], Made]) -> Made:
    """Return what the work returns; it is done once more if its process is lost. Raises ProcessLost if that one is
    too.
    """
    try:
        return work()
    except ProcessLost as lost:
        log.warning("%s; it is tried once more, in another process", lost)
    return work()


class WatchedConnection:
    """Blocking connection to a process, which is looked at while it is silent.

    Both methods raise ProcessLost if the process was stopped or has ended, and TimeoutError after `wall_s` seconds
    from the line's start.
    """

    def __init__(self, connection: socket.socket, process: WatchedProcess, wall_s: float) -> None:
        self._connection, self._process = connection, process
        self._until = time.monotonic() + wall_s
        self._gone = False
        connection.settimeout(POLL_S)

    def recv(self, size: int) -> bytes:
        while True:
            try:
                return self._connection.recv(size)
            except TimeoutError:
                self._poll()

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._connection.send(left) :]
            except TimeoutError:
                self._poll()

    def _poll(self) -> None:
        if self._process.end_if_stopped():
            raise ProcessLost("the process was stopped")
        if self._gone:  # already when it was silent for POLL_S seconds more: another process holds its end
            raise ProcessLost("the process has ended")
        self._gone = self._process.is_gone()
        if time.monotonic() >= self._until:
            raise TimeoutError


class Forkserver:
    """Process that others are forked from; it ends when its socket does.

    module     dotted name, run with the number of its socket's descriptor and `arguments`
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False
    ) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
            )
        self._watched = WatchedProcess(self._process.pid)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def line(self, wall_s: float) -> WatchedConnection:
        """Return a connection to the forkserver itself, for what is said before it forks."""
        return WatchedConnection(self._control, self._watched, wall_s)

    def child(self) -> tuple[socket.socket, WatchedProcess]:
        """Fork a new process, and return a socket that is connected to it. Raises ProcessLost if the forkserver was
        stopped, has ended, or takes too long; it is closed unless it only takes long.
        """
        ours, theirs = socket.socketpair()
        try:
            forked = self._fork(ours, theirs)
        except TimeoutError:
            ours.close()
            raise ProcessLost(
                f"the forkserver forked no process within {FORK_TIMEOUT_S:g} s: the machine may be overloaded"
            ) from None
        except (OSError, ProcessLost) as error:
            ours.close()
            self.close()
            raise ProcessLost(str(error)) from None
        return ours, WatchedProcess(forked)

    def _fork(self, ours: socket.socket, theirs: socket.socket) -> int:
        with theirs:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        forked = receive_frame(WatchedConnection(ours, self._watched, FORK_TIMEOUT_S))
        if forked is None:
            raise ProcessLost("the process that forks others has ended")
        return forked[1]

    def close(self) -> None:
        self._control.close()
        self._watched.end_if_stopped(at_once=True)
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def fork_for_each(control: socket.socket, child: Callable[[socket.socket], NoReturn]) -> None:
    """Fork a process for each socket that comes, and say there which it is, until the connection ends. In the
    forkserver.
    """
    while True:
        data, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            pid = os.fork()
            if pid == 0:
                control.close()
                child(connection)
            with contextlib.suppress(OSError):  # nobody waits for it any more
                connection.sendall(encode_frame(GrammarReply.FORKED, pid))


def prepare_forkserver(niceness: int = 0) -> None:
    """Set up this process for forking others from it. `niceness`: how much lower its priority is than the engine's."""
    with contextlib.suppress(OSError):
        os.nice(niceness)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no one to wait for them
    prepare_child()


def prepare_child() -> None:
    """Set up this process to outlive Ctrl-C, which is for the service that closes its socket, and to leave no core."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(more: int) -> None:
    """Allow this process `more` bytes beyond what it has now."""
    try:
        with open("/proc/self/statm") as statm:
            now = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # no Linux: the timers alone
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
