"""Clients that hold a connection for as long as they are let: what they are told, and when it is closed."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import cast

from endless import http_head
from raw_http import DATA, END_STREAM, HEADERS, MOST_DATA, Http2, frame
from serve_process import wait_for

COMPLETIONS = "POST /v1/completions"
COMPLETE = "/motley.v1.Inference/Complete"
JSON = "Content-Type: application/json\r\n"
DRIP_S = 0.1
TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Closed:
    """The bytes received, and the seconds from the connection to the answer and to its close."""

    received: bytes
    answered_s: float
    closed_s: float


def held(port: int, begin: bytes, part: bytes = b"") -> Closed:
    """Sends `begin`, and `part` again and again, until the connection is closed by the other side."""
    began, answered_s, received = time.monotonic(), 0.0, b""
    seconds: Callable[[], float] = lambda: time.monotonic() - began  # noqa: E731
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(begin)
        connection.settimeout(DRIP_S)
        with suppress(ConnectionError):
            while True:
                assert seconds() < TIMEOUT_S, f"it is open still: {received!r}"
                with suppress(TimeoutError):
                    if not (more := connection.recv(65_536)):
                        break
                    answered_s, received = answered_s or seconds(), received + more
                    continue
                connection.sendall(part)
    return Closed(received, answered_s, seconds())


def held_call(port: int, fields: list[tuple[str, str]], data: bytes, part: bytes = b"") -> Closed:
    """The same with a gRPC call: its head, `data`, then `part`, whatever the window says."""
    began, answered_s, number = time.monotonic(), 0.0, 0
    client = Http2(port)
    seconds: Callable[[], float] = lambda: time.monotonic() - began  # noqa: E731
    with suppress(ConnectionError):
        number, opening = client.head(port, COMPLETE, fields)
        client.connection.sendall(opening + (frame(DATA, 0, number, data) if data else b""))
        while True:
            assert seconds() < TIMEOUT_S, f"it is open still: {client.payloads}"
            client.read(DRIP_S)
            if (HEADERS, number) in client.payloads:
                answered_s = answered_s or seconds()
            if part:
                client.connection.sendall(frame(DATA, 0, number, part))
    client.close()
    return Closed(client.payloads.get((HEADERS, number), b""), answered_s, seconds())


def half_closed(port: int, method: str, fields: list[tuple[str, str]] | None = None) -> str:
    """Return what ends a call whose client has closed its side and sent no message."""
    client = Http2(port)
    number, opening = client.head(port, method, fields or [])
    client.connection.sendall(opening + frame(DATA, END_STREAM, number))
    wait_for(lambda: client.read(1.0) and b"grpc-status" in client.payloads.get((HEADERS, number), b""), "its end", 30)
    client.close()
    return client.payloads[HEADERS, number].decode("latin-1")


@contextmanager
def halves_of_bodies(port: int, count: int, size: int, fields: str = "") -> Iterator[Callable[[], Counter[str]]]:
    """So many bodies of which all but the end is sent, at once. Tells how many have which status so far."""
    begin = http_head(COMPLETIONS, f"{JSON}{fields}Content-Length: {size + 1}\r\n")
    with ExitStack() as open_things:
        connections = []
        for _ in range(count):
            connection = open_things.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            connections.append(connection)
            with suppress(ConnectionError):
                connection.sendall(begin + b" " * size)
        responses: dict[socket.socket, str] = {}

        def statuses(wait_s: float = 5.0) -> Counter[str]:
            with selectors.DefaultSelector() as selector:  # not `select`, which takes no descriptor from 1024 on
                for one in connections:
                    if one not in responses:
                        selector.register(one, selectors.EVENT_READ)
                for key, _ in selector.select(wait_s) if selector.get_map() else ():
                    one = cast("socket.socket", key.fileobj)
                    responses[one] = one.recv(4096)[9:12].decode()
            return Counter(responses.values())

        yield statuses


@contextmanager
def halves_of_messages(port: int, count: int, fields: list[tuple[str, str]]) -> Iterator[Callable[[], list[str]]]:
    """So many calls, each of a connection of its own, with as much of a message of 1 MiB as the window has room for.

    Tells what has ended each of those that have ended so far.
    """
    calls: list[tuple[Http2, int]] = []
    begin = b"\0" + struct.pack(">I", 2**20) + b"x" * (MOST_DATA - 5)
    try:
        for _ in range(count):
            client = Http2(port)
            number, opening = client.head(port, COMPLETE, fields)
            calls.append((client, number))
            with suppress(ConnectionError):
                client.connection.sendall(opening + b"".join(frame(DATA, 0, number, begin[:MOST_DATA]) for _ in "123"))

        def ended() -> list[str]:
            for client, _ in calls:
                with suppress(ConnectionError):
                    client.read(0.001)
            heads = [client.payloads.get((HEADERS, number), b"") for client, number in calls]
            return [head.decode("latin-1") for head in heads if b"grpc-status" in head]

        yield ended
    finally:
        for client, _ in calls:
            client.close()
