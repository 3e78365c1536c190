"""Connection pool to Redis. Connections are made and replaced in the background, so that no request waits for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .circuit_breaker import CircuitBreaker
from .redis_wire import RedisErrorReply, RedisProtocolError, RedisWire, encode_command

CONNECT_S = 1.0  # timeout of a connection attempt, and of each step of its handshake
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # bounds of the pause between attempts to connect


class ConnectionPool:
    """Pool of at most `size` connections.

    connect  makes a connection, including its handshake; it may raise anything
    report_failure  called with one word that says why a connection could not be made
    """

    def __init__(
        self,
        connect: Callable[[], RedisWire],
        size: int,
        breaker: CircuitBreaker,
        report_failure: Callable[[str], None],
    ) -> None:
        self._connect, self._size, self._breaker, self._report_failure = connect, size, breaker, report_failure
        self._idle: list[RedisWire] = []  # the last used is the next to be lent, so that the others stay idle
        self._alive = 0  # number of connections, idle and lent
        self._closed = False
        self._changed = threading.Condition()
        self._keeper = threading.Thread(target=self._keep, name="prefix-connections", daemon=True)
        self._keeper.start()

    @contextmanager
    def lent(self, deadline: float) -> Iterator[RedisWire | None]:
        """Lend a connection while the context is open; None if none exists or becomes free by the deadline.

        After an exception the connection is closed.
        """
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

    def _take(self, deadline: float) -> RedisWire | None:
        with self._changed:
            while not self._closed:
                while self._idle:
                    wire = self._idle.pop()
                    if wire.idle:
                        return wire
                    wire.close()  # the server has closed it meanwhile
                    self._alive -= 1
                    self._changed.notify_all()
                left = deadline - time.monotonic()
                if self._alive == 0 or left <= 0:
                    return None
                self._changed.wait(left)
            return None

    def _give_back(self, wire: RedisWire) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(wire)
                self._changed.notify()
                return
        wire.close()

    def _drop(self, wire: RedisWire) -> None:
        wire.close()
        with self._changed:
            self._alive -= 1
            self._changed.notify_all()

    def _keep(self) -> None:
        """Run the keeper thread: make missing connections, and try a failed server again."""
        pause_s = 0.0
        while self._wait_until_needed(pause_s):
            try:
                wire = self._connect()
            except Exception as error:  # noqa: BLE001  any error of a library, a resolver or a server
                self._report_failure(failure_reason(error))
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

    def _wait_until_needed(self, pause_s: float) -> bool:
        """Wait until a connection is to be made, at least `pause_s` seconds; return False when the pool is closed."""
        until = time.monotonic() + pause_s
        with self._changed:
            while not self._closed:
                due_s = self._breaker.due_s()
                missing = self._alive < self._size
                if due_s is not None:  # the server has failed: try it no sooner than the breaker says
                    wait_s = max(due_s, until - time.monotonic())
                elif missing:
                    wait_s = until - time.monotonic()
                else:
                    wait_s = CONNECT_S
                if wait_s <= 0:
                    return True
                self._changed.wait(min(wait_s, CONNECT_S))
            return False


def failure_reason(error: BaseException) -> str:
    """Return one word for an error, under which it is counted."""
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "timeout"
    if isinstance(error, RedisProtocolError):
        return "protocol"
    if "Auth" in type(error).__name__ or "Permission" in type(error).__name__:
        return "refused"
    return "connection"


def redis_connector(settings: dict[str, Any]) -> Callable[[], RedisWire]:
    """Return a function that connects with the settings of `check_url`.

    redis-py handles addresses, TLS, users and databases; then we take over its socket.
    """
    from redis.backoff import NoBackoff
    from redis.connection import Connection, SSLConnection
    from redis.retry import Retry

    given = {name: value for name, value in settings.items() if name != "connection_class"}
    kind = settings.get("connection_class", Connection)
    if issubclass(kind, SSLConnection):
        given.setdefault("ssl_check_hostname", True)  # redis-py 5 does not check it by default
    fixed = {
        "protocol": 2, "socket_timeout": CONNECT_S, "socket_connect_timeout": CONNECT_S, "retry": Retry(NoBackoff(), 0),
        "client_name": "motley",
    }  # fmt: skip

    def connect() -> RedisWire:
        connection = kind(**{**given, **fixed})
        connection.connect()
        wire = RedisWire(connection._sock)
        connection._sock = None  # the wire owns it from now on: the connection would close it
        try:
            _ping(wire)
        except BaseException:
            wire.close()
            raise
        return wire

    return connect


def _ping(wire: RedisWire) -> None:
    deadline = time.monotonic() + CONNECT_S
    wire.send([encode_command(b"PING")], deadline)
    reply = wire.reply(deadline)
    if isinstance(reply, RedisErrorReply):
        raise PermissionError(reply)  # such as NOAUTH, or a user without permission
    if reply != b"PONG":
        raise RedisProtocolError("no PONG")
