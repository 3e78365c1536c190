"""A redis-server that can be killed, stopped and restarted, and a proxy that makes its network slow.

`motley bench prefix` and the tests use both.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from motley.cluster.prefix_store.redis_binaries import RedisBinary, find_redis_binaries, no_redis
from motley.cluster.prefix_store.redis_wire import encode_command
from motley.cluster.service_errors import ConfigurationError

_START_S = 10.0


class RedisProcess:
    """A redis-server on a Unix socket in `folder` and a loopback port, in memory only; it may be restarted repeatedly.

    settings  further arguments of the server
    binary    program that is run; None: the first choice of a service
    """

    def __init__(self, folder: Path, *settings: str, binary: RedisBinary | None = None) -> None:
        self.path = folder / "redis.sock"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._settings, self._binary = settings, binary
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        """Start the server and return once it answers. Raises ConfigurationError."""
        binary = self._binary or next(iter(find_redis_binaries()), None)
        if binary is None:
            raise ConfigurationError(no_redis(), code="bad_prefix_cache")
        fixed = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--dir", str(self.path.parent))
        ways = ("--port", str(self.port), "--unixsocket", str(self.path))
        self.process = subprocess.Popen([binary.path, *ways, *fixed, *self._settings], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while self.ask("PING") is None:
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.kill()
                raise ConfigurationError(f"{binary.path} does not answer", code="bad_prefix_cache")
            time.sleep(0.01)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop the process with SIGSTOP: it answers nothing, and keeps its data and connections."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def ask(self, *arguments: str) -> bytes | None:
        return ping_socket(self.path, *arguments)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


def ping_socket(path: Path, *arguments: str) -> bytes | None:
    """Send one command on a connection of its own; return the beginning of the reply, or None if nobody answers."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(encode_command(*(word.encode() for word in arguments)))
        return connection.recv(65_536)
    return None


class SlowProxy:
    """TCP proxy to a server on loopback.

    After `slow`, replies are `delay_s` late, or come at `trickle` bytes a second.
    """

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.delay_s, self.trickle = 0.0, 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def slow(self, *, delay_s: float = 0.0, trickle: int = 0) -> None:
        self.delay_s, self.trickle = delay_s, trickle

    def close(self) -> None:
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._open += [client, server]
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if replies and self.delay_s:
                    time.sleep(self.delay_s)
                if replies and (trickle := self.trickle):
                    for byte in data:
                        sink.sendall(bytes([byte]))
                        time.sleep(1 / trickle)
                else:
                    sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow_proxy(port: int) -> Iterator[SlowProxy]:
    proxy = SlowProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
