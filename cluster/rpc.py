"""What every gRPC method has around it: who may call, and errors as status codes."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from ..replicas.errors import InvalidRequest, MotleyError
from .guard import check_peer
from .servicers import Malformed

Reply = TypeVar("Reply", bound=Message)
Unary = Callable[[Any, Any, Any], Awaitable[Reply]]
Stream = Callable[[Any, Any, Any], AsyncGenerator[Reply, None]]


def unary(reply: type[Reply]) -> Callable[[Unary[Reply]], Unary[Reply]]:
    """For `async def Method(self, request, grpc_context) -> reply`."""

    def decorate(method: Unary[Reply]) -> Unary[Reply]:
        @functools.wraps(method)
        async def call(self: Any, request: Any, grpc_context: Any) -> Reply:
            try:
                _admit(request, grpc_context)
                return await method(self, request, grpc_context)
            except MotleyError as error:
                _set_status(grpc_context, error)
                return reply()

        return call

    return decorate


def stream(method: Stream[Reply]) -> Stream[Reply]:
    """For `async def Method(self, request, grpc_context)`, a generator of replies."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, grpc_context: Any) -> AsyncGenerator[Reply, None]:
        try:
            _admit(request, grpc_context)
            async with aclosing(method(self, request, grpc_context)) as replies:
                async for reply in replies:
                    yield reply
        except MotleyError as error:
            _set_status(grpc_context, error)
            if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
                raise  # Serve's own proxy hands on a stream's status only so; it costs a trace in the log

    return call


def _admit(request: Any, context: Any) -> None:
    check_peer(_host(context.peer()), (key for key, _ in context.invocation_metadata()))
    if isinstance(request, Malformed):
        raise InvalidRequest(f"the request's bytes do not parse: {request.reason}", code="malformed_message")


def _host(peer: str) -> str:
    """`ipv4:127.0.0.1:4711`, `ipv6:%5B::1%5D:4711` or `unix:…` -> the address alone."""
    family, _, rest = peer.partition(":")
    if family == "unix":
        return "127.0.0.1"
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")


def _set_status(context: Any, error: MotleyError) -> None:
    context.set_code(grpc.StatusCode[error.grpc_code])
    context.set_details(error.message)
