"""Clients over HTTP/1.1 that send without end, over a socket that is connected."""

from __future__ import annotations

import select
import socket
import ssl
import time
from contextlib import suppress

import pytest

# Taken at most after an answer: what lingering reads, 8 MiB of a body, and all that lies in sockets on the way.
MAX_TAKEN = 64 * 2**20
CHUNK = b"10000\r\n" + b" " * 65_536 + b"\r\n"
WAIT_S = 30.0


def http_head(first: str, fields: str) -> bytes:
    return f"{first} HTTP/1.1\r\nHost: 127.0.0.1\r\n{fields}\r\n".encode()


def flood(connection: socket.socket, begin: bytes, part: bytes) -> tuple[bytes, int]:
    """Return what is answered to `begin` and then `part` without end, and how much of that was taken until it was
    closed.
    """
    received, taken, pending = b"", 0, begin
    connection.setblocking(False)
    deadline = time.monotonic() + WAIT_S
    with suppress(OSError):  # a reset, since it goes on sending
        while taken < MAX_TAKEN:
            assert time.monotonic() < deadline, (received, taken)
            select.select([connection], [connection], [], 1)
            with suppress(BlockingIOError, ssl.SSLWantReadError):
                if not (more := connection.recv(65_536)):
                    break
                received += more
            with suppress(BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                sent = connection.send(pending)
                pending, taken = pending[sent:] or part, taken + sent
    with suppress(OSError):
        while more := connection.recv(65_536):
            received += more
    return received, taken


def drip(connection: socket.socket, begin: bytes, part: bytes = b" ") -> bytes:
    """Return what is answered to `begin`, and then `part` again and again, until the connection is closed."""
    received = b""
    deadline = time.monotonic() + WAIT_S
    connection.sendall(begin)
    connection.settimeout(0.05)
    with suppress(ConnectionError, ssl.SSLError):
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                if not (more := connection.recv(65_536)):
                    return received
                received += more
            connection.sendall(part)
        pytest.fail(f"it goes on dripping: {received!r}")
    return received
