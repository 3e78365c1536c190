"""OpenAI's endpoints that this service refuses by name, with what to use instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.responses import Response

from ....replicas.errors import NotFound
from ...transport.http_server.http_responses import Route

_CHAT = "use /v1/chat/completions, which has tools, reasoning and streaming too"
_NO_STATE = "nothing is stored between requests"
_TEXT = "the model reads and writes text"
REFUSED: Mapping[str, str] = {
    "/v1/responses": _CHAT,
    "/v1/conversations": _CHAT,
    "/v1/assistants": _CHAT,
    "/v1/threads": _CHAT,
    "/v1/realtime": _CHAT,
    "/v1/batches": "send the requests themselves: they are batched as they come",
    "/v1/files": _NO_STATE,
    "/v1/uploads": _NO_STATE,
    "/v1/vector_stores": _NO_STATE,
    "/v1/containers": _NO_STATE,
    "/v1/evals": "an evaluation harness can use /v1/completions with echo and logprobs",
    "/v1/fine_tuning": "the model is served as it is",
    "/v1/moderations": "the model writes text and judges none",
    "/v1/images": _TEXT,
    "/v1/audio": _TEXT,
    "/v1/videos": _TEXT,
    "/v1/edits": _CHAT,
}
METHODS = ("GET", "POST", "DELETE")
STORED = "/v1/chat/completions"  # other servers have stored chats below it and, with GET, at it
WHY_NOT_STORED = f"stored chats are not supported; {_NO_STATE}"


def refused_routes() -> list[Route]:
    """Return routes for each refused path and all paths below it, and for stored chats below /v1/chat/completions."""
    routes = [
        Route(method, path, _refusal(f"{prefix} is not supported; {instead}"), any_query=True)
        for prefix, instead in REFUSED.items()
        for path in (prefix, prefix + "/{rest:path}")
        for method in METHODS
    ]
    stored = _refusal(WHY_NOT_STORED)
    return [
        *routes,
        Route("GET", STORED, stored, any_query=True),
        *(Route(method, STORED + "/{rest:path}", stored, any_query=True) for method in METHODS),
    ]


def _refusal(message: str) -> Callable[..., Awaitable[Response]]:
    async def refuse() -> Response:
        raise NotFound(message, code="unsupported_endpoint")

    return refuse
