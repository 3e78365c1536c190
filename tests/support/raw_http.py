"""Clients that a library would not let us be: HTTP/1.1 and HTTP/2 by hand, over sockets we may leave unread."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
CANCEL = 8
INITIAL_WINDOW_SIZE = 4  # a setting
MOST_DATA = 16_384  # bytes of a frame, unless the other side allows more


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def head(port: int, path: str, body: bytes, method: str = "POST", close: bool = True, request_id: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}"] + ["Connection: close"] * close
    lines += [f"X-Request-Id: {request_id}"] * bool(request_id)
    return "\r\n".join([*lines, "", ""]).encode()


async def post(port: int, path: str, content: dict[str, Any] | bytes) -> Answer:
    """One request on a connection of its own, read to its end."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head(port, path, body) + body)
        raw_head = await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read()
    finally:
        writer.close()
    first, *lines = raw_head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    whole = rest if "chunked" not in headers.get("transfer-encoding", "") else b"".join(_chunks(rest))
    return Answer(int(first.split()[1]), headers, whole)


def _chunks(raw: bytes) -> Iterator[bytes]:
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        yield raw[:length]
        raw = raw[length + 2 :]


def unread(port: int, path: str, content: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody reads, over a connection with room for little."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    body = json.dumps(content).encode()
    connection.sendall(head(port, path, body) + body)
    return connection


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """HPACK without an index or a code: both names and values under 127 bytes."""
    return b"".join(
        bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields
    )


class Http2:
    """One HTTP/2 connection that opens gRPC calls and leaves them as it likes.

    `window`: bytes that each of its streams may be sent before it says more, as it does of all that it reads; default:
    65,535. `connection`: one that is there already, as one over TLS.
    """

    def __init__(self, port: int, window: int | None = None, connection: socket.socket | None = None) -> None:
        self.connection = connection or socket.create_connection(("127.0.0.1", port))
        settings = b"" if window is None else struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings))
        self._next = 1
        self._rest = b""
        self.payloads: dict[tuple[int, int], bytes] = {}  # of HEADERS and DATA, by kind and stream
        self.goaway: bytes | None = None

    def close(self) -> None:
        self.connection.close()

    def open(
        self, port: int, method: str, message: bytes, timeout: str = "", request_id: str = ""
    ) -> tuple[int, bytes]:
        """A call's frames, to be sent; and its stream's number. `timeout`: as `grpc-timeout` has it."""
        fields = [("grpc-timeout", timeout)] if timeout else []
        fields += [("x-request-id", request_id)] if request_id else []
        number, head = self.head(port, method, fields)
        data = b"\0" + struct.pack(">I", len(message)) + message
        parts = [data[start : start + MOST_DATA] for start in range(0, len(data), MOST_DATA)]
        frames = [frame(DATA, END_STREAM * (part is parts[-1]), number, part) for part in parts]
        return number, head + b"".join(frames)

    def head(
        self,
        port: int,
        path: str,
        more: Iterable[tuple[str, str]] = (),
        media: str = "application/grpc",
        scheme: str = "http",
    ) -> tuple[int, bytes]:
        """The frame of a call's head alone, to be sent; and its stream's number."""
        number, self._next = self._next, self._next + 2
        fields = [(":method", "POST"), (":scheme", scheme), (":path", path), (":authority", f"127.0.0.1:{port}")]
        fields += [("content-type", media), ("te", "trailers"), *more]
        return number, frame(HEADERS, END_HEADERS, number, header_block(fields))

    def reset(self, number: int) -> bytes:
        return frame(RST_STREAM, 0, number, struct.pack(">I", CANCEL))

    def read(self, seconds: float) -> list[tuple[int, int]]:
        """Kind and stream of the frames that come within that time; keeps the connection going."""
        self.connection.settimeout(seconds)
        try:
            received = self.connection.recv(1 << 20)
        except TimeoutError:
            return []
        if not received:
            raise ConnectionError("closed by the server")
        self._rest += received
        frames = []
        while len(self._rest) >= 9:
            length = int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < 9 + length:
                break
            kind, flags = self._rest[3], self._rest[4]
            stream, payload = int.from_bytes(self._rest[5:9], "big"), self._rest[9 : 9 + length]
            self._rest = self._rest[9 + length :]
            self._keep(kind, flags, stream, payload)
            if kind in (HEADERS, DATA):
                self.payloads[kind, stream] = self.payloads.get((kind, stream), b"") + payload
            frames.append((kind, stream))
        return frames

    def _keep(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.connection.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.connection.sendall(frame(PING, ACK, 0, payload))
        elif kind == DATA and payload:
            more = struct.pack(">I", len(payload))
            self.connection.sendall(frame(WINDOW_UPDATE, 0, 0, more) + frame(WINDOW_UPDATE, 0, stream, more))
        elif kind == GOAWAY:
            self.goaway = payload
