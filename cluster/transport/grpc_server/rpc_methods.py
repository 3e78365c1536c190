"""Wrapper of every gRPC method: checks the caller before it reads the request, converts errors to status codes, and
writes a line of the access log.

A class with such methods has a `guard` and its `readers`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from ....replicas.errors import DeadlineExceeded, MotleyError
from ...request_errors import internal_error
from ...security.auth.call_guard import Headers
from ...security.edge.haproxy_config import PEER_HEADER, TIMEOUT_HEADER
from ...security.edge.head_limits import check_head
from .. import access_log
from ..access_log import CallRecord, clean_id
from ..caller import MAX_CLIENT_ID, Caller
from ..retry_after import add_retry_metadata
from .unparsed_request import read_request, read_requests

log = logging.getLogger(__name__)
REQUEST_ID = "x-request-id"
MAX_DETAILS = 500  # characters, each of up to 12 bytes on the wire: more than 8 KiB of metadata loses the whole status
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

Method = TypeVar("Method", bound=Callable[..., Any])
Reply = TypeVar("Reply", bound=Message)
Unary = Callable[[Any, Any, Any], Awaitable[Reply]]
Stream = Callable[[Any, Any, Any], AsyncGenerator[Reply, None]]


def tells_health(method: Method) -> Method:
    """Mark a method that tells health and no more, so that `--open-health` opens it. Apply it below `unary`, `stream`
    or `bidirectional`.
    """
    method.tells_health = True  # type: ignore[attr-defined]
    return method


def tells_metrics(method: Method) -> Method:
    """Mark a method of the control plane that tells metrics and no more, so that a key for metrics opens it too.
    Apply it below `unary` or `stream`.
    """
    method.tells_metrics = True  # type: ignore[attr-defined]
    return method


def unary(reply: type[Reply]) -> Callable[[Unary[Reply]], Unary[Reply]]:
    """Wrap a method `async def Method(self, request, caller) -> reply`."""

    def decorate(method: Unary[Reply]) -> Unary[Reply]:
        @_named(method)
        async def call(self: Any, request: Any, grpc_context: Any) -> Reply:
            try:
                with _admitted(self, method, grpc_context) as caller:
                    return await method(self, await read_request(request, caller.tenant), caller)
            except MotleyError as error:
                _set_status(grpc_context, error)
                return reply()

        return call

    return decorate


def stream(method: Stream[Reply]) -> Stream[Reply]:
    """Wrap a method `def Method(self, request, caller)` that returns a generator of replies."""

    async def one(request: Any, tenant: str) -> Any:
        return await read_request(request, tenant)

    return _streaming(method, one)


def bidirectional(method: Stream[Reply]) -> Stream[Reply]:
    """Wrap a method `def Method(self, requests, caller)`, as `stream` does, for a call with any number of requests."""

    async def each(requests: Any, tenant: str) -> Any:
        return read_requests(requests, tenant)

    return _streaming(method, each)


def _streaming(method: Stream[Reply], take: Callable[[Any, str], Awaitable[Any]]) -> Stream[Reply]:
    @_named(method)
    async def call(self: Any, request: Any, grpc_context: Any) -> AsyncGenerator[Reply, None]:
        try:
            with _admitted(self, method, grpc_context) as caller:
                replies = self.readers.watched(method(self, await take(request, caller.tenant), caller), _num_bytes)
                async with aclosing(replies):
                    async for reply in replies:
                        yield reply
        except MotleyError as error:
            _set_status(grpc_context, error)
            if getattr(grpc_context, "forwarded", False):
                raise  # Serve's own proxy passes a stream's status on only this way; it costs a trace in the log

    return call


def _named(method: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Copy the method's name and docstring, but not its signature: Serve looks there for `grpc_context`."""

    def name(call: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(call, method)
        del call.__wrapped__  # type: ignore[attr-defined]
        return call

    return name


@contextmanager
def _admitted(ingress: Any, method: Callable[..., Any], context: Any) -> Iterator[Caller]:
    """Yield the caller, once it is admitted: nothing of the request is read before. Writes a line of the access log.

    Raises only MotleyError: any other exception is a bug, whose trace is logged.
    """
    given_metadata = context.invocation_metadata()
    metadata = [(name, value) for name, value in given_metadata if isinstance(value, str)]
    given = next((value for name, value in metadata if name == REQUEST_ID), "")
    call = CallRecord("grpc", method.__name__, clean_id(given, MAX_CLIENT_ID))
    record = access_log.begin_record(call, metadata)
    context.set_trailing_metadata([(REQUEST_ID, record.client_id or record.id)])
    status = "UNKNOWN"
    try:
        check_head("", given_metadata)
        if getattr(method, "tells_metrics", False):
            record.tenant = ingress.guard.reader(metadata)
        else:
            health = getattr(method, "tells_health", False)
            record.tenant = ingress.guard.tenant(_host(context.peer()), metadata, health=health)
        yield Caller(
            tenant=record.tenant,
            timeout_s=_timeout_s(context, metadata),
            client_id=record.client_id,
            peer=next((value for name, value in metadata if name == PEER_HEADER), "") or _host(context.peer()),
        )
        status = "OK"
    except MotleyError as error:
        status = error.grpc_code
        record.refused(error)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        status = "CANCELLED"
        raise
    except Exception as error:
        log.exception("%s failed inside the service", method.__name__)
        bug = internal_error()
        status = bug.grpc_code
        record.refused(bug)
        raise bug from error
    finally:
        record.ended(status)


def _timeout_s(context: Any, metadata: Headers) -> float | None:
    """Return what is left of the call's own deadline, in seconds. Serve does not pass it on, so HAProxy writes it into
    a header.
    """
    given = next((value for name, value in metadata if name == TIMEOUT_HEADER), None)
    timeout_s = context.time_remaining() if given is None and hasattr(context, "time_remaining") else _parse(given)
    if timeout_s is not None and timeout_s <= 0:
        raise DeadlineExceeded("the call's deadline has passed")
    return timeout_s


def _parse(timeout: str | None) -> float | None:
    """Parse a timeout as gRPC writes it on the wire: at most eight digits and a unit."""
    match = re.fullmatch(r"([0-9]{1,8})([HMSmun])", timeout or "")
    return None if match is None else int(match[1]) * _UNITS_S[match[2]]


def _host(peer: str) -> str:
    """Return the address alone from gRPC's peer: `ipv4:127.0.0.1:4711`, `ipv6:%5B::1%5D:4711` or `unix:…`."""
    family, _, rest = peer.partition(":")
    if family == "unix":
        return "127.0.0.1"
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")


def _num_bytes(reply: Message) -> int:
    return reply.ByteSize()


def _set_status(context: Any, error: MotleyError) -> None:
    context.set_code(grpc.StatusCode[error.grpc_code])
    long = len(error.message) > MAX_DETAILS
    context.set_details(error.message[:MAX_DETAILS] + "..." if long else error.message)
    add_retry_metadata(context, error)
