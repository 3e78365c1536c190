"""A request as it came: bytes, until it is known who sent them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from ...replicas.errors import InvalidRequest
from .fields import check_fields


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
    async for request in requests:
        yield read(request)
