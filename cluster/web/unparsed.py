"""A request as it came: bytes, until it is known who sent them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from ...replicas.errors import DeadlineExceeded, InvalidRequest
from ..edge.edge import MIN_STALL_S
from ..streams import next_of
from .fields import check_fields

FIRST_S = float(MIN_STALL_S)  # for the first message of a stream of them, which HAProxy does not wait for


@dataclass(frozen=True, slots=True)
class Unparsed:
    """A message of `kind`, if `data` is one. Serve's own proxy sends it to the ingress by pickle."""

    kind: type[Message]
    data: bytes

    def parsed(self) -> Message:
        """Raises InvalidRequest where the bytes are no such message, or hold more than one may."""
        check_fields(self.data, cast(Descriptor, self.kind.DESCRIPTOR))
        try:
            return self.kind.FromString(self.data)
        except DecodeError as error:
            message = f"the request's bytes do not parse: {error}"
            raise InvalidRequest(message, code="malformed_message") from None


def read(request: Any) -> Any:
    """The message, or of a stream of them each when it is taken. What is parsed already stays as it is."""
    if isinstance(request, Unparsed):
        return request.parsed()
    return request if isinstance(request, Message) else _each(request)


async def _each(requests: AsyncIterable[Any]) -> AsyncGenerator[Message, None]:
    """Raises DeadlineExceeded when the first does not come: later ones may be long in coming."""
    requests = aiter(requests)
    try:
        async with asyncio.timeout(FIRST_S):
            found = await next_of(requests)
    except TimeoutError:
        raise DeadlineExceeded(f"the stream's first message did not arrive within {FIRST_S:g} s") from None
    for request in found:
        yield read(request)
    async for request in requests:
        yield read(request)
