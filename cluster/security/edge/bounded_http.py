"""uvicorn's HTTP/1.1 with a bound on heads. At the front HAProxy bounds them; at a direct port nothing else would."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .haproxy_config import BUFFER_BYTES, HEAD_S


class BoundedHttp(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # httptools' or h11's
    """HTTP/1.1 protocol that closes a connection whose next head is not complete HEAD_S after it began, or is larger
    than HAProxy would read.

    A connection's first head begins when the connection is made.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_bytes = 0
        self._due: asyncio.TimerHandle | None = None
        self._head_begins()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._head_is_over()
        elif before is None or before.response_complete:
            self._head_begins()
            self._head_bytes += len(data)
            if self._head_bytes > BUFFER_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the head of the request is larger than {BUFFER_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        super().connection_lost(exc)

    def _head_begins(self) -> None:
        if self._due is None:
            self._due = self.loop.call_later(HEAD_S, self.transport.close)

    def _head_is_over(self) -> None:
        self._head_bytes = 0
        if self._due is not None:
            self._due.cancel()
            self._due = None


def bound_heads() -> None:
    """Make uvicorn use BoundedHttp wherever it is not told which protocol to use, as Serve does not tell it."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedHttp.__name__}"
