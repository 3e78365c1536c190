"""Check of which web pages may call (CORS)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....replicas.errors import InvalidRequest
from ....replicas.short_repr import short_repr
from .http_responses import error_response

_METHOD = "access-control-request-method"


class ExplainingCors(CORSMiddleware):
    """Starlette's CORS middleware, except that a refused preflight says why, as every error does."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if "origin" in headers and _METHOD in headers:
                await self._preflight(headers, scope["path"])(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def _preflight(self, headers: Headers, path: str) -> Response:
        preflight = self.preflight_response(request_headers=headers)
        if preflight.status_code == 200:
            return preflight
        refusal = error_response(self._refused(headers), path)
        cors_headers = {name: value for name, value in preflight.headers.items() if not name.startswith("content-")}
        refusal.headers.update(cors_headers)
        return refusal

    def _refused(self, headers: Headers) -> InvalidRequest:
        origin, method = headers["origin"], headers[_METHOD]
        if not self.is_allowed_origin(origin):
            message = f"Origin: pages of {short_repr(origin)} may not call; --cors-origin of motley serve names who may"
            return InvalidRequest(message, param="Origin", code="cors_refused")
        if method not in self.allow_methods:
            message = f"Access-Control-Request-Method: {short_repr(method)}: expected {' or '.join(self.allow_methods)}"
            return InvalidRequest(message, param="Access-Control-Request-Method", code="cors_refused")
        message = "Access-Control-Request-Private-Network is not supported"
        return InvalidRequest(message, param="Access-Control-Request-Private-Network", code="cors_refused")
