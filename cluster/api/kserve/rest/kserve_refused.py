"""Triton's endpoints that this service refuses by name, with what to use instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.responses import Response

from .....replicas.errors import NotFound
from ....transport.http_server.http_responses import Route

_TRACES = "spans are not kept; an answer's parameters tell its tokens, and the access log each call"
_MODELS = "one model is served; `motley fleet update` changes its weights"
_SHARED = "shared memory is not supported; send tensors in the body, as JSON or as binary data"
REFUSED: Mapping[str, str] = {
    "/v2/models/{name:path}/trace/setting": f"trace settings are not supported; {_TRACES}",
    "/v2/trace/setting": f"trace settings are not supported; {_TRACES}",
    "/v2/logging": "log settings are not supported; what is logged is chosen when the service starts",
    "/v2/repository/models/{name:path}/load": f"loading models is not supported; {_MODELS}",
    "/v2/repository/models/{name:path}/unload": f"unloading models is not supported; {_MODELS}",
    "/v2/systemsharedmemory/{rest:path}": _SHARED,
    "/v2/cudasharedmemory/{rest:path}": _SHARED,
}


def refused_kserve_routes() -> list[Route]:
    """Return the routes of refused endpoints. They must come before the routes of models, whose names would match
    them.
    """
    return [
        Route(method, path, _refusal(message), any_query=True)
        for path, message in REFUSED.items()
        for method in ("GET", "POST")
    ]


def _refusal(message: str) -> Callable[..., Awaitable[Response]]:
    async def refuse() -> Response:
        raise NotFound(message, code="unsupported_endpoint")

    return refuse
