"""Spans of OpenTelemetry for calls: one from a call's arrival to its end, below its client's span if it names one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_CONTEXT_HEADERS = ("traceparent", "tracestate")  # of W3C's Trace Context
_FAILED = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
_tracer: Tracer | None = None


def trace_calls(tracer: Tracer | None) -> None:
    """Make a span for each call of this process that begins from now on; None: for no call."""
    global _tracer
    _tracer = tracer


def calls_are_traced() -> bool:
    return _tracer is not None


def begin_span(protocol: str, call: str, headers: Iterable[tuple[str, str]]) -> Span | None:
    """Return the span of a call that begins; None if calls are not traced.

    protocol, call  as in `CallRecord`
    headers         the call's headers, names in lower case
    """
    if _tracer is None:
        return None
    from opentelemetry.trace import SpanKind  # where nothing is traced, nothing of it is imported
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: value for name, value in headers if name in _CONTEXT_HEADERS}
    context = TraceContextTextMapPropagator().extract(carrier)
    if protocol == "http":
        method, _, path = call.partition(" ")
        attributes = {"http.request.method": method, "url.path": path}
    else:
        attributes = {"rpc.system": "grpc", "rpc.method": call}
    return _tracer.start_span(call, context, SpanKind.SERVER, attributes)


def end_span(span: Span, protocol: str, status: int | str, code: str) -> None:
    """End a call's span.

    status  HTTP's number, or the name of gRPC's code
    code    code of the error that the client got; empty: none
    """
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("http.response.status_code" if protocol == "http" else "rpc.grpc.status_code", status)
    if code:
        span.set_attribute("error.type", code)
    if status in _FAILED or (isinstance(status, int) and status >= 500):
        span.set_status(Status(StatusCode.ERROR))
    span.end()
