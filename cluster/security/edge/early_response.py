"""Answers that begin before the request's body has fully arrived: they are the last of their connection, which is then
closed.

A server is free to refuse a request by its head, or in the middle of its body. Its client may still be sending, without
end or a byte a second, and uvicorn would read that for as long as it comes. Closing at once is no better: the kernel
answers unread bytes with a reset, which can overtake the answer on its way to the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .haproxy_config import LAST_HEADER
from .read_turns import ReadTurns

LINGER_BYTES = 4 * 2**20  # read and thrown away after an early answer, before the connection is closed
LINGER_S = 5.0  # seconds to linger at most
_LAST = ((b"connection", b"close"), (LAST_HEADER.encode(), b"1"))
_Headers = Iterable[tuple[bytes, bytes]]


class EarlyResponseMiddleware:
    """ASGI middleware, the outermost. Adds `connection: close` to early answers, and delays the close for a while.

    Bodies are read in turns, so that many at once do not block the event loop.
    """

    def __init__(self, app: ASGIApp, linger_bytes: int = LINGER_BYTES, linger_s: float = LINGER_S) -> None:
        self._app = app
        self._linger_bytes = linger_bytes
        self._linger_s = linger_s
        self._turns = ReadTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(scope["headers"]):
            await self._app(scope, receive, send)
            return
        body = _ReceivedBody(receive, self._turns, invited=all(name != b"expect" for name, _ in scope["headers"]))
        response = _EarlyResponse(send, body)
        await self._app(scope, body.receive, response.send)
        if response.held:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._linger_s):
                    await body.discard(self._linger_bytes)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def has_body(headers: _Headers) -> bool:
    """Return whether a request with this head has a body, of one byte at least."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 ") != b"")
        for name, value in headers
    )


class _ReceivedBody:
    """A request's body as it is received.

    whole    whether nothing more will come: it has arrived, or its client has disconnected
    invited  False: the client sends it only after `100 Continue`, which reading it would send
    """

    def __init__(self, receive: Receive, turns: ReadTurns, *, invited: bool) -> None:
        self._receive = receive
        self._turns = turns
        self._invited = invited
        self.whole = False

    async def receive(self) -> Message:
        """Return the next message of the request; wait for a turn before a part of its body."""
        if not self.whole:
            await self._turns.wait()
        return await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self.whole = self.whole or not message.get("more_body", False)
        return message

    async def arrived(self, max_bytes: int = 2**18) -> bool:
        """Return whether the body is complete. Reads some of what has arrived already, since nobody else may have read
        it.
        """
        if self._invited and not self.whole:
            with suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await self._discard(max_bytes, self._next)
        return self.whole

    async def discard(self, max_bytes: int) -> None:
        """Read and drop the body, to its end or up to `max_bytes`."""
        await self._discard(max_bytes, self.receive)

    async def _discard(self, max_bytes: int, receive: Receive) -> None:
        while not self.whole and max_bytes > 0:
            max_bytes -= len((await receive()).get("body", b""))


class _EarlyResponse:
    """Forwards an answer. The end of an early one is held back while the remaining body is read.

    held  whether the whole answer has been sent, but its end not yet reported to the server
    """

    def __init__(self, send: Send, body: _ReceivedBody) -> None:
        self._send = send
        self._body = body
        self._early = False
        self.held = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not await self._body.arrived():
            headers = [(name, value) for name, value in message["headers"] if name.lower() != b"connection"]
            # Without a length, only the end shows the client that the answer is complete: it cannot be held back.
            self._early = any(name.lower() == b"content-length" for name, _ in headers)
            message = {**message, "headers": [*headers, *_LAST]}
        elif self._early and not message.get("more_body", False):
            self.held, message = True, {**message, "more_body": True}
        await self._send(message)
