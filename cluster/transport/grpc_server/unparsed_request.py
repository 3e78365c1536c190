"""Requests that stay bytes until it is known who sent them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from ....replicas.errors import DeadlineExceeded, InvalidRequest
from ...async_streams import next_item
from ...security.edge.haproxy_config import MIN_STALL_S
from ..incoming_bodies import INCOMING_BODIES, MAX_MESSAGE_BYTES
from .message_limits import check_message_size

FIRST_S = float(MIN_STALL_S)  # seconds from the head of a call to the end of its first message


@dataclass(frozen=True, slots=True)
class UnparsedRequest:
    """A message of `kind`, if `data` is one. Serve's own proxy sends it to the ingress by pickle."""

    kind: type[Message]
    data: bytes

    def parsed(self) -> Message:
        """Return the message. Raises InvalidRequest if the bytes are no such message, or hold more than one may."""
        check_message_size(self.data, cast(Descriptor, self.kind.DESCRIPTOR))
        try:
            return self.kind.FromString(self.data)
        except DecodeError as error:
            message = f"the request's bytes do not parse: {error}"
            raise InvalidRequest(message, code="malformed_message") from None


async def read_request(request: Any, tenant: str = "") -> Message:
    """Return the one message of a call; a parsed message is returned as it is.

    Raises InvalidRequest if the caller has closed its side without a message, DeadlineExceeded if the message is late,
    and Overloaded if too many calls wait for one.
    """
    if isinstance(request, Message):
        return request
    if isinstance(request, UnparsedRequest):
        return request.parsed()
    return _parsed(await _first(aiter(request), tenant, late_bytes=MAX_MESSAGE_BYTES))


async def read_requests(requests: AsyncIterable[Any], tenant: str = "") -> AsyncGenerator[Message, None]:
    """Yield the messages of a call that may have many. Raises as `read_request` does: gRPC does not tell a call that
    broke off within its first message from one without any, so neither is answered with OK.
    """
    requests = aiter(requests)
    yield _parsed(await _first(requests, tenant, late_bytes=0))  # a late call is mostly idle, not half a message
    async for request in requests:
        yield _parsed(request)


async def _first(requests: AsyncIterable[Any], tenant: str, *, late_bytes: int) -> Any:
    """Return the first message of a call, not parsed yet. Raises as `read_request` does."""
    body = INCOMING_BODIES.begin(tenant)
    try:
        found = await body.next(next_item(requests), asyncio.get_running_loop().time() + FIRST_S, late_bytes)
    except TimeoutError:
        raise DeadlineExceeded(f"the call's first message did not arrive within {FIRST_S:g} s") from None
    finally:
        body.end()
    if not found:
        message = "the call was closed without a whole message; expected one"
        raise InvalidRequest(message, code="no_message")
    return found[0]


def _parsed(request: Any) -> Message:
    return request.parsed() if isinstance(request, UnparsedRequest) else cast(Message, request)
