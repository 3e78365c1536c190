"""A few connections to Redis, made and mended in the background: no request ever waits for one to be made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .breaker import CircuitBreaker
from .wire import ProtocolError, Refused, Wire, command

__all__ = ["CONNECT_S", "Connections", "redis_connector"]

CONNECT_S = 1.0  # also for each step of a handshake
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # between attempts to connect


class Connections:
    """At most `size`. `told` hears why a connection could not be made, in a word.

    connect  makes one, past its handshake; it may raise anything
    """

    def __init__(
        self, connect: Callable[[], Wire], size: int, breaker: CircuitBreaker, told: Callable[[str], None]
    ) -> None:
        self._connect, self._size, self._breaker, self._told = connect, size, breaker, told
        self._idle: list[Wire] = []  # the one used last is the next: the others may rest
        self._alive = 0  # idle ones and those that are lent
        self._closed = False
        self._changed = threading.Condition()
        self._keeper = threading.Thread(target=self._keep, name="prefix-connections", daemon=True)
        self._keeper.start()

    @contextmanager
    def lent(self, deadline: float) -> Iterator[Wire | None]:
        """One of them, or None: there is none, or none was free in time. After an exception it is closed."""
        wire = self._take(deadline)
        if wire is None:
            yield None
            return
        try:
            yield wire
        except BaseException:
            self._drop(wire)
            raise
        self._give_back(wire)

    @property
    def alive(self) -> int:
        return self._alive

    def close(self) -> None:
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for wire in idle:
            wire.close()
        self._keeper.join(2 * CONNECT_S)

    def _take(self, deadline: float) -> Wire | None:
        with self._changed:
            while not self._closed:
                while self._idle:
                    wire = self._idle.pop()
                    if wire.idle:
                        return wire
                    wire.close()  # the server has ended it meanwhile
                    self._alive -= 1
                    self._changed.notify_all()
                left = deadline - time.monotonic()
                if self._alive == 0 or left <= 0:
                    return None
                self._changed.wait(left)
            return None

    def _give_back(self, wire: Wire) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(wire)
                self._changed.notify()
                return
        wire.close()

    def _drop(self, wire: Wire) -> None:
        wire.close()
        with self._changed:
            self._alive -= 1
            self._changed.notify_all()

    def _keep(self) -> None:
        """The keeper's life: make what is missing, and ask a server that has failed whether it is well again."""
        pause_s = 0.0
        while self._wait_until_wanted(pause_s):
            try:
                wire = self._connect()
            except Exception as error:  # noqa: BLE001  whatever a library, a resolver or a server comes up with
                self._told(reason_of(error))
                self._breaker.failed()
                pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                continue
            pause_s = 0.0
            self._breaker.answered()
            with self._changed:
                if self._alive >= self._size and self._idle:
                    self._idle.pop(0).close()
                    self._alive -= 1
                self._alive += 1
            self._give_back(wire)

    def _wait_until_wanted(self, pause_s: float) -> bool:
        """Until a connection is to be made, after a pause at least; False: never again."""
        until = time.monotonic() + pause_s
        with self._changed:
            while not self._closed:
                due_s = self._breaker.due_s()
                missing = self._alive < self._size
                if due_s is not None:  # the server has failed: ask it when the breaker says so, and not sooner
                    wait_s = max(due_s, until - time.monotonic())
                elif missing:
                    wait_s = until - time.monotonic()
                else:
                    wait_s = CONNECT_S
                if wait_s <= 0:
                    return True
                self._changed.wait(min(wait_s, CONNECT_S))
            return False


def reason_of(error: BaseException) -> str:
    """A word for what is counted."""
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "timeout"
    if isinstance(error, ProtocolError):
        return "protocol"
    if "Auth" in type(error).__name__ or "Permission" in type(error).__name__:
        return "refused"
    return "connection"


def redis_connector(settings: dict[str, Any]) -> Callable[[], Wire]:
    """Connects as `check_url` found out: redis-py does addresses, TLS, users and databases; then we have the socket."""
    from redis.backoff import NoBackoff
    from redis.connection import Connection, SSLConnection
    from redis.retry import Retry

    given = {name: value for name, value in settings.items() if name != "connection_class"}
    kind = settings.get("connection_class", Connection)
    if issubclass(kind, SSLConnection):
        given.setdefault("ssl_check_hostname", True)  # which redis-py 5 does not do by itself
    fixed = {
        "protocol": 2, "socket_timeout": CONNECT_S, "socket_connect_timeout": CONNECT_S, "retry": Retry(NoBackoff(), 0),
        "client_name": "motley",
    }  # fmt: skip

    def connect() -> Wire:
        connection = kind(**{**given, **fixed})
        connection.connect()
        wire = Wire(connection._sock)
        connection._sock = None  # it is the wire's from now on: the connection would close it
        try:
            _ping(wire)
        except BaseException:
            wire.close()
            raise
        return wire

    return connect


def _ping(wire: Wire) -> None:
    deadline = time.monotonic() + CONNECT_S
    wire.send([command(b"PING")], deadline)
    answer = wire.reply(deadline)
    if isinstance(answer, Refused):
        raise PermissionError(answer)  # such as NOAUTH, or a user without a right to ask
    if answer != b"PONG":
        raise ProtocolError("no PONG")
