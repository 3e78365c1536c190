"""All that can be asked, asked of every port: every HTTP route and every RPC, and what came back."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from listeners import Listener
from raw_http import ACK, SETTINGS, head

NOT_SPOKEN = "another protocol"
REFUSED = {"401", "404", "UNAUTHENTICATED", "UNIMPLEMENTED", NOT_SPOKEN}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
AT_ONCE = 4  # of each port: one of Ray's servers queues five connections and drops others
SILENT_S = 60.0  # whoever is silent for so long does not answer; nothing here comes near it
MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Way:
    """A port, and how it is spoken to. `tls`: for HTTP and gRPC; None in the clear. `key`: empty for none."""

    listener: Listener
    tls: tuple[ssl.SSLContext, grpc.ChannelCredentials] | None = None
    key: str = ""

    @property
    def host(self) -> str:
        if self.tls is not None:
            return "localhost"  # as the certificate says
        everywhere = self.listener.loopback or self.listener.address in ("0.0.0.0", "::")
        return "127.0.0.1" if everywhere else self.listener.address


@dataclass(frozen=True, slots=True)
class Answer:
    """said: an HTTP status, the name of a gRPC code (OK: a message came), or NOT_SPOKEN."""

    way: Way
    call: str
    said: str
    body: bytes = b""

    @property
    def refused(self) -> bool:
        return self.said in REFUSED

    @property
    def ours(self) -> bool:
        """Refused by the guard, in its words."""
        return b"a valid API key" in self.body

    def __str__(self) -> str:
        one = self.way.listener
        return f"{one.address}:{one.port} ({one.command[:40]}) {self.call}: {self.said} {self.body[:80]!r}"


async def walk(ways: Sequence[Way], routes: Sequence[tuple[str, str]], rpcs: Sequence[str]) -> list[Answer]:
    """`routes`: methods and paths. `rpcs`: as package.Service/Method."""
    over_both = [*routes, *(("POST", f"/{rpc}") for rpc in rpcs)]

    async def all_of(way: Way) -> list[Answer]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def gated(call: Coroutine[Any, Any, Answer]) -> Answer:
            async with gate:
                return await asyncio.wait_for(call, SILENT_S)

        responses = [Answer(way, "HTTP", NOT_SPOKEN)]
        if (await gated(over_http(way, "GET", "/"))).said != NOT_SPOKEN:
            responses = await asyncio.gather(*(gated(over_http(way, *route)) for route in over_both))
        if not await asyncio.wait_for(speaks_http2(way), SILENT_S):
            return [*responses, Answer(way, "gRPC", NOT_SPOKEN)]
        async with channel(way) as open_channel:
            return responses + await asyncio.gather(*(gated(over_grpc(way, open_channel, rpc)) for rpc in rpcs))

    found = await asyncio.gather(*(all_of(way) for way in ways))
    return [response for responses in found for response in responses]


async def over_http(way: Way, method: str, path: str) -> Answer:
    """One request on a connection of its own."""
    request = head(way.listener.port, path, b"{}", method) + b"{}"
    if way.key:
        request = request.replace(b"\r\n", f"\r\nx-api-key: {way.key}\r\n".encode(), 1)
    raw = await exchange(way, request)
    call = f"{method} {path}"
    if not raw.startswith(b"HTTP/1."):
        return Answer(way, call, NOT_SPOKEN, raw)
    first, _, body = raw.partition(b"\r\n\r\n")
    return Answer(way, call, first.split()[1].decode(), body)


async def speaks_http2(way: Way) -> bool:
    reply = await exchange(way, PREFACE, 9)
    return len(reply) == 9 and reply[3] == SETTINGS and reply[4] != ACK


async def exchange(way: Way, data: bytes, most: int = MAX_BYTES) -> bytes:
    """Return what comes back, up to `most` bytes; nothing if the other side refuses or breaks off."""
    received = b""
    with suppress(OSError, ssl.SSLError):
        reader, writer = await asyncio.open_connection(way.host, way.listener.port, ssl=way.tls and way.tls[0])
        try:
            writer.write(data)
            while len(received) < most and (part := await reader.read(most - len(received))):
                received += part
        finally:
            writer.close()
    return received


def channel(way: Way) -> grpc.aio.Channel:
    target = f"{way.host}:{way.listener.port}"
    if way.tls is None:
        return grpc.aio.insecure_channel(target)
    return grpc.aio.secure_channel(target, way.tls[1])


async def over_grpc(way: Way, open_channel: grpc.aio.Channel, rpc: str) -> Answer:
    """An empty message; on the wire all four kinds of calls begin alike. OK as soon as something comes back."""
    metadata = (("x-api-key", way.key),) if way.key else ()
    call = open_channel.unary_stream(f"/{rpc}")(b"", metadata=metadata, timeout=SILENT_S)
    try:
        async for reply in call:
            if reply:  # an empty one may go before a refusal
                return Answer(way, rpc, "OK", reply)
        return Answer(way, rpc, (await call.code()).name)
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        # An answer of HTTP alone, over HTTP/2: `walk` asks for the same path over HTTP, and sees what it tells.
        said = NOT_SPOKEN if "Data frame with END_STREAM" in details else error.code().name
        return Answer(way, rpc, said, details.encode())
    finally:
        call.cancel()
