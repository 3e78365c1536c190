"""Processes that are forked from one which has imported and loaded what they need: both ends of it.

A process of either kind that is stopped (SIGSTOP) is ended and counts as lost, while one that only takes long does not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from .grammar_wire import From, frame, receive
from .stopped import LOOK_S, WatchedProcess

__all__ = ["Line", "Lost", "Nursery", "fork_for_each", "twice"]

log = logging.getLogger(__name__)

Made = TypeVar("Made")

FORK_S = 40.0  # most seconds that a fork may take, on a busy machine


class Lost(Exception):
    """Error for work whose process was stopped, or could not be forked: through no fault of the work, which may be
    tried once more.
    """


def twice(work: Callable[[], Made]) -> Made:
    """Return what the work returns; it is done once more if its process is lost. Raises Lost if that one is too."""
    try:
        return work()
    except Lost as lost:
        log.warning("%s; it is tried once more, in another process", lost)
    return work()


class Line:
    """Blocking connection to a process, which is looked at while it is silent.

    Both methods raise Lost if the process was stopped or has ended, and TimeoutError after `wall_s` seconds from the
    line's start.
    """

    def __init__(self, connection: socket.socket, process: WatchedProcess, wall_s: float) -> None:
        self._connection, self._process = connection, process
        self._until = time.monotonic() + wall_s
        self._gone = False
        connection.settimeout(LOOK_S)

    def recv(self, size: int) -> bytes:
        while True:
            try:
                return self._connection.recv(size)
            except TimeoutError:
                self._look()

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._connection.send(left) :]
            except TimeoutError:
                self._look()

    def _look(self) -> None:
        if self._process.end_if_stopped():
            raise Lost("the process was stopped")
        if self._gone:  # already when it was silent for LOOK_S seconds more: another process holds its end
            raise Lost("the process has ended")
        self._gone = self._process.is_gone()
        if time.monotonic() >= self._until:
            raise TimeoutError


class Nursery:
    """Process that others are forked from; it ends when its socket does.

    module     of this package, run with the number of its socket's descriptor and `arguments`
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False
    ) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.{module}", str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
            )
        self._watched = WatchedProcess(self._process.pid)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def line(self, wall_s: float) -> Line:
        """Return a connection to the nursery itself, for what is said before it forks."""
        return Line(self._control, self._watched, wall_s)

    def child(self) -> tuple[socket.socket, WatchedProcess]:
        """Fork a new process, and return a socket that is connected to it. Raises Lost if the nursery was stopped, has
        ended, or takes too long; it is closed unless it only takes long.
        """
        ours, theirs = socket.socketpair()
        try:
            forked = self._fork(ours, theirs)
        except TimeoutError:
            ours.close()
            raise Lost(f"no process was forked within {FORK_S:g} s") from None
        except (OSError, Lost) as error:
            ours.close()
            self.close()
            raise Lost(str(error)) from None
        return ours, WatchedProcess(forked)

    def _fork(self, ours: socket.socket, theirs: socket.socket) -> int:
        with theirs:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        forked = receive(Line(ours, self._watched, FORK_S))
        if forked is None:
            raise Lost("the process that forks others has ended")
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
    nursery.
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
                connection.sendall(frame(From.FORKED, pid))
