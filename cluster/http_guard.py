"""Stands before every route: who may call, and what kind of body is looked at, before any of it is parsed."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..replicas.errors import InvalidRequest, MotleyError
from .errors import TooLarge, UnsupportedMedia
from .guard import check_host, check_peer
from .http import error_response

# Serve would obey it, and a closed connection would then no longer stop its sequence.
_SERVE_ONLY = "x-request-disconnect-disabled"


class HttpGuard:
    """ASGI middleware. `max_body_bytes` counts what arrives, whatever Content-Length says."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except MotleyError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        client = scope.get("client")
        check_peer(client[0] if client else "", headers.keys())
        check_host(headers.get("host", ""))
        if _SERVE_ONLY in headers:
            raise InvalidRequest(f"{_SERVE_ONLY} is not supported", param=_SERVE_ONLY, code="unsupported_parameter")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            self._check_body(headers)

    def _check_body(self, headers: Headers) -> None:
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMedia("the body must be application/json", param="Content-Type", code="unsupported_media")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedMedia("the body must not be encoded", param="Content-Encoding", code="unsupported_media")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length[:19]) > self._max_body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        left = self._max_body_bytes

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")
