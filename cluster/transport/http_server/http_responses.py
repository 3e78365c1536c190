"""JSON answers, errors and event streams over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....replicas.errors import MotleyError, ReaderStalled
from ...request_errors import internal_error
from .. import access_log
from ..caller import Caller
from ..retry_after import retry_after_s
from ..slow_clients import ClientReader, SlowClientMonitor
from .response_content import EncodedObject, JsonObject, ResponseContent, StreamingContent, encode_json

log = logging.getLogger(__name__)

PART_BYTES = 16_384  # bytes of an event in one write
CALLER = "motley.caller"  # key under which the guard puts the Caller in the ASGI scope
_KSERVE = "/v2"  # root of KServe's paths, whose errors have a form of their own


@dataclass(frozen=True, slots=True)
class Route:
    """A path, and the handler that answers it.

    health     whether it tells health and no more, so that `--open-health` opens it
    metrics    whether it tells metrics, which are of all tenants: those who may read these call it
    any_query  whether it takes any query; otherwise every query is refused
    tensors    whether bodies are JSON, maybe followed by binary data, with the media types of Triton's clients:
               `check_tensors`
    """

    method: str
    path: str
    endpoint: Callable[..., Awaitable[Response]]
    health: bool = False
    metrics: bool = False
    any_query: bool = False
    tensors: bool = False


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


def json_response(content: ResponseContent) -> Response:
    if isinstance(content, StreamingContent):
        return EventStream(content)
    return Response(_body(content), media_type="application/json")


def error_body(error: MotleyError) -> JsonObject:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: MotleyError, path: str) -> Response:
    """Return an error in the form of the protocol that the path belongs to, whether or not the path exists."""
    access_log.current_record().refused(error)
    seconds = retry_after_s(error)
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    if error.status == 401:
        headers["www-authenticate"] = 'Bearer realm="motley"'
    # ASCII, since a client's own words may be quoted in it, lone surrogates included.
    kserve = path == _KSERVE or path.startswith(f"{_KSERVE}/")
    body = json.dumps({"error": error.message} if kserve else error_body(error))
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


class EventStream(Response):
    """A response of server-sent events: one write for each message of the replica, and `done` if it ends well.

    An error after the beginning, of whatever kind, is an event in the form that `error` gives it, and then there is no
    `done`. If the client reads nothing, or too slowly, its connection is closed (`SlowClientMonitor`).
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        streaming: StreamingContent,
        done: bytes = b"data: [DONE]\n\n",
        error: Callable[[MotleyError], JsonObject] = error_body,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._streaming, self._done, self._error = streaming, done, error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        readers: SlowClientMonitor = scope["app"].state.readers
        task = asyncio.current_task()
        assert task is not None
        with readers.reader(task.cancel) as reader:
            try:
                await self._write(reader, send)
            except asyncio.CancelledError:
                if not reader.stalled or task.uncancel():  # it was cancelled for another reason
                    raise
                access_log.current_record().refused(ReaderStalled("", code="reader_stalled"))

    async def _write(self, reader: ClientReader, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            """Send the data in parts, so that a client that reads slowly is seen to read."""
            for start in range(0, max(len(data), 1), PART_BYTES):
                part = data[start : start + PART_BYTES]
                last = start + PART_BYTES >= len(data)
                reader.writing()
                await send({"type": "http.response.body", "body": part, "more_body": more or not last})
                reader.written(partial(len, part))

        async with aclosing(self._streaming.rest) as rest:
            first = _events(self._streaming.first)  # a failure here is still a status of its own
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await write(first)
            try:
                async for chunks in rest:
                    await write(_events(chunks))
            except MotleyError as error:
                failure = error
            except Exception:
                log.exception("a stream of events failed inside the service")
                failure = internal_error()
            else:
                await write(self._done, more=False)
                return
            access_log.current_record().refused(failure)
            await write(_events([self._error(failure)]), more=False)


def _events(chunks: Sequence[JsonObject | EncodedObject]) -> bytes:
    return b"".join(b"data: " + _body(chunk) + b"\n\n" for chunk in chunks)


def _body(content: JsonObject | EncodedObject) -> bytes:
    return content.body if isinstance(content, EncodedObject) else encode_json(content)
