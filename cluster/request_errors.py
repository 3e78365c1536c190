"""Errors that only the ingress can raise, and the errors that clients get when another process fails."""

from __future__ import annotations

from typing import Any

import grpc
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from ..replicas.errors import EngineFault, InvalidRequest, MotleyError, NotFound, Overloaded, Unavailable
from ..replicas.short_repr import MAX_REPR_CHARS, short_repr

# Paths that are asked for out of habit.
_DESCRIBED = "GET /openapi.json describes every path and field, for whatever shows such descriptions"
_INSTEAD = {
    "/docs": _DESCRIBED,
    "/redoc": _DESCRIBED,
}


class MethodNotAllowed(MotleyError):
    """The path does not have this method."""

    status = 405
    grpc_code = "UNIMPLEMENTED"
    kind = "invalid_request_error"


class NotImplementedHere(MotleyError):
    """The protocol has this call, but this service does not."""

    status = 501
    grpc_code = "UNIMPLEMENTED"
    kind = "invalid_request_error"


class BodyTooLarge(MotleyError):
    """The body is over the limit; it was not parsed."""

    status = 413
    grpc_code = "RESOURCE_EXHAUSTED"
    kind = "invalid_request_error"


class HeadTooLarge(MotleyError):
    """The head is over the limit: path, headers or metadata."""

    status = 431
    grpc_code = "RESOURCE_EXHAUSTED"
    kind = "invalid_request_error"


class SlowBody(MotleyError):
    """The body took too long to arrive."""

    status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    kind = "invalid_request_error"


class UnsupportedMedia(MotleyError):
    """The body is not plain JSON."""

    status = 415
    grpc_code = "INVALID_ARGUMENT"
    kind = "invalid_request_error"


def too_many_message(what: str, limit: str) -> str:
    """Return the error text for a body, a message or a part of one that is refused before it is read, over every
    protocol.
    """
    return f"{what} holds more than {limit}; expected at most as many"


def unknown_field(name: str) -> InvalidRequest:
    name = name[:MAX_REPR_CHARS]
    return InvalidRequest(f"{name}: there is no such field", param=name, code="unknown_parameter")


def unsupported_field(name: str, instead: str = "leave it out", value: Any = None) -> InvalidRequest:
    """Return the error for an unsupported field. `value`: the value that is not supported, if other values are."""
    what = name if value is None else f"{name}: {short_repr(value)}"
    return InvalidRequest(f"{what} is not supported; {instead}", param=name, code="unsupported_parameter")


def internal_error() -> EngineFault:
    """Return the error that a client gets for a bug; its trace is only in the log."""
    return EngineFault("the request failed inside the service", code="internal_error")


def error_from_replica(error: Exception) -> MotleyError:
    """Return the client's error for a failed call to a replica. Keeps internals out of the message."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, MotleyError):
        return cause
    if isinstance(error, BackPressureError):
        return Overloaded("every replica is full; try again shortly", code="overloaded")
    if isinstance(error, RayTaskError):
        return EngineFault("the replica failed on this request; its log says why", code="engine_fault")
    if isinstance(error, DeploymentUnavailableError | RayServeException | RayError) or _connection_lost(error):
        return Unavailable("the replica went away; try again shortly", code="replica_lost")
    return EngineFault("the request failed inside the service; its log says why", code="internal_error")


def _connection_lost(error: Exception) -> bool:
    """Return whether gRPC's error means a lost connection: Serve passes such errors on; a reply that is too large
    is none.
    """
    return isinstance(error, grpc.aio.AioRpcError) and error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED


def http_error(status: int, method: str, path: str) -> MotleyError:
    """Return the error for what the HTTP framework itself refuses: a wrong path or method. A long path is cut."""
    path = path if len(path) <= MAX_REPR_CHARS else f"{path[:MAX_REPR_CHARS]}..."
    if status == 405:
        return MethodNotAllowed(f"{method} is not a method of {path}", code="method_not_allowed")
    if status == 404:
        instead = f"; {_INSTEAD[path]}" if path in _INSTEAD else ""
        return NotFound(f"there is no {path}{instead}", code="not_found")
    return InvalidRequest(f"the request was refused with status {status}", code="bad_request")
