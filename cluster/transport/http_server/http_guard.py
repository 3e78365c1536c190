"""Guard before every HTTP route: checks who calls and how large the body is, before any of it is parsed.

It also writes each call to the access log when the call ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....replicas.errors import InvalidRequest, MotleyError
from ....replicas.short_repr import short_repr
from ...ray_compat.visible_names import DISCONNECTS_IGNORED
from ...request_errors import BodyTooLarge, NotImplementedHere, SlowBody, UnsupportedMedia, internal_error
from ...security.auth.call_guard import CallGuard
from ...security.edge.head_limits import check_head
from .. import access_log
from ..access_log import CallRecord, clean_id
from ..call_spans import calls_are_traced
from ..caller import MAX_CLIENT_ID, Caller
from ..incoming_bodies import INCOMING_BODIES, IncomingBodies, IncomingBody
from .http_responses import CALLER, error_response

REQUEST_ID = "x-request-id"
_REFUSAL = "websocket.http.response"  # ASGI's extension: an answer with a body in place of the handshake
_JSON, _TENSORS, _CURL = "application/json", "application/octet-stream", "application/x-www-form-urlencoded"
_BROWSERS = ("origin", "sec-fetch-site")  # headers that a browser adds to a page's cross-site requests
_UTF_8 = ("utf-8", "utf8", "us-ascii", "ascii")
MAX_PATH = 256  # characters of the path in the log
BODY_S = 30.0  # from the head of a request to the last byte of its body
LEFT = 499  # status in the log if the client disconnected before the whole answer


class HttpGuard:
    """ASGI middleware that admits callers and bounds their requests.

    guard            decides who may call
    max_body_bytes   most bytes of a body; what arrives counts, whatever Content-Length says
    health_paths     paths that tell health and no more
    metrics_paths    paths that tell metrics, which tenants may not read
    echo_id          whether answers get x-request-id here; Serve's own server adds it itself
    arriving         counts bodies that have not fully arrived
    """

    def __init__(
        self,
        app: ASGIApp,
        guard: CallGuard,
        max_body_bytes: int,
        health_paths: Collection[str] = (),
        metrics_paths: Collection[str] = (),
        echo_id: bool = True,
        arriving: IncomingBodies = INCOMING_BODIES,
    ) -> None:
        self._app = app
        self._guard = guard
        self._max_body_bytes = max_body_bytes
        self._health_paths = frozenset(health_paths)
        self._metrics_paths = frozenset(metrics_paths)
        self._echo_id = echo_id
        self._arriving = arriving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http" or _REFUSAL in scope.get("extensions", {}):
            await self._serve({**scope, "path": scope["path"].rstrip("/") or "/"}, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: HTTP 403 without a body

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = clean_id(headers.get(REQUEST_ID, ""), MAX_CLIENT_ID)
        method = scope.get("method", "WEBSOCKET")
        call = CallRecord("http", f"{method} {scope['path'][:MAX_PATH]}", given)
        record = access_log.begin_record(call, headers.items() if calls_are_traced() else ())
        response = _TrackedResponse(send, (record.client_id or record.id) if self._echo_id else None)
        try:
            await self._respond(scope, headers, receive, response, record)
        except ClientDisconnect:  # nobody is left to answer
            raise
        except Exception:
            if not response.begun:
                await error_response(internal_error(), scope["path"])(scope, receive, response)
            raise  # the server writes its trace to the log
        finally:
            record.ended(response.status if response.whole else LEFT)

    async def _respond(
        self, scope: Scope, headers: Headers, receive: Receive, response: _TrackedResponse, record: CallRecord
    ) -> None:
        try:
            scope[CALLER] = self._check(scope, headers, record)
        except MotleyError as error:
            await error_response(error, scope["path"])(scope, receive, response)
            return
        body = self._arriving.begin(record.tenant)
        try:
            await self._app(scope, self._bounded(receive, body), response)
        finally:
            body.end()

    def _check(self, scope: Scope, headers: Headers, record: CallRecord) -> Caller:
        check_head(scope.get("raw_path", b"") + scope.get("query_string", b""), scope["headers"])
        client = scope.get("client")
        peer, host, path = client[0] if client else "", headers.get("host", ""), scope["path"]
        if path in self._metrics_paths:
            record.tenant = self._guard.reader(peer, headers.items(), host)
        else:
            health = path in self._health_paths and scope.get("method") in ("GET", "HEAD")
            record.tenant = self._guard.tenant(peer, headers.items(), host=host, health=health)
        if scope["type"] == "websocket":
            raise NotImplementedHere(
                "WebSocket is not supported; POST, and read streams as events", code="not_implemented"
            )
        if DISCONNECTS_IGNORED in headers:  # a closed connection would no longer cancel its request
            message = f"{DISCONNECTS_IGNORED} is not supported"
            raise InvalidRequest(message, param=DISCONNECTS_IGNORED, code="unsupported_parameter")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            self._check_length(headers)
        return Caller(tenant=record.tenant, client_id=record.client_id)

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):  # `int` does not take some digits of Latin-1
            raise InvalidRequest(
                f"Content-Length: {short_repr(length)} is not accepted; expected a number of bytes",
                param="Content-Length",
                code="invalid_value",
            )
        if int(length.lstrip("0")[:19] or "0") > self._max_body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive, body: IncomingBody) -> Receive:
        left, whole = self._max_body_bytes, False
        deadline = asyncio.get_running_loop().time() + BODY_S

        async def bounded() -> Message:
            nonlocal left, whole
            if whole:
                return await receive()  # from now on only to see the client disconnect
            try:
                message = await body.next(receive(), deadline)
            except TimeoutError:
                raise SlowBody(f"the body did not arrive within {BODY_S:g} s", code="slow_body") from None
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_large()
            whole = not message.get("more_body", False)
            if whole:
                body.end()
            else:
                body.hold("bytes", len(message.get("body", b"")))
            return message

        return bounded

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")


def check_media(headers: Headers, kinds: Collection[str] = (_JSON,)) -> None:
    """Raise UnsupportedMedia for a body that is not plain JSON. Routes call it, since an unknown path is reported
    first.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() not in kinds:
        raise UnsupportedMedia(
            f"the body must be {' or '.join(filter(None, kinds))}", param="Content-Type", code="unsupported_media"
        )
    if charset := _foreign_charset(headers):
        raise UnsupportedMedia(
            f"Content-Type: charset {short_repr(charset)} is not supported; JSON is UTF-8",
            param="Content-Type",
            code="unsupported_media",
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("the body must not be encoded", param="Content-Encoding", code="unsupported_media")


def check_tensors(headers: Headers) -> None:
    """Raise UnsupportedMedia for a body that Triton's clients do not send: they send JSON, binary data, no type, or
    curl's.

    From a browser fewer types are accepted, since a web page could send the others without a preflight; browsers are
    known by headers that a page cannot leave out.
    """
    browser = any(name in headers for name in _BROWSERS)
    check_media(headers, (_JSON, _TENSORS) if browser else (_JSON, _TENSORS, "", _CURL))


def _foreign_charset(headers: Headers) -> str:
    """Return the body's charset if it is declared as other than UTF-8 or its part US-ASCII; else an empty string."""
    for parameter in headers.get("content-type", "").split(";")[1:]:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"')
        if name.strip().lower() == "charset" and charset.lower() not in _UTF_8:
            return charset or "''"
    return ""


class _TrackedResponse:
    """Forwards the application's answer, and records its status, whether it has begun, and whether it was sent in
    full.
    """

    def __init__(self, send: Send, request_id: str | None) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 500
        self.begun = False
        self.whole = False

    async def __call__(self, message: Message) -> None:
        if message["type"].endswith("http.response.start"):  # a WebSocket's refusal has a prefix
            self.begun, self.status = True, message["status"]
            if self._request_id is not None:
                MutableHeaders(scope=message)[REQUEST_ID] = self._request_id
        await self._send(message)
        self.whole = message["type"].endswith("http.response.body") and not message.get("more_body", False)
