"""FastAPI application of the ingress: every protocol's routes, and errors in that protocol's form."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ....replicas.errors import InvalidRequest, MotleyError, NotFound
from ....replicas.short_repr import MAX_REPR_CHARS
from ...request_errors import http_error, internal_error
from ...security.auth.call_guard import CallGuard
from ..slow_clients import SlowClientMonitor
from .cors import ExplainingCors
from .http_guard import REQUEST_ID, HttpGuard, check_media, check_tensors
from .http_responses import Route, error_response

CORS_AGE_S = 600
_AZURE_VERSION = "api-version"


def build_fastapi_app(
    routes: Sequence[Route],
    guard: CallGuard,
    *,
    max_body_bytes: int,
    cors_origins: Sequence[str] = (),
    echo_id: bool = True,
    readers: SlowClientMonitor | None = None,
) -> FastAPI:
    """Return the application. `cors_origins`: web pages from there may call, with an API key of their own, never with
    cookies.
    """
    app = FastAPI(title="Motley", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.readers = SlowClientMonitor() if readers is None else readers
    for route in routes:
        checks = [Depends(_named)] + ([] if route.any_query else [Depends(_no_query)])
        if route.method == "POST" and not route.any_query:  # a route that refuses every body does not check it
            checks.append(Depends(_tensors if route.tensors else _json))
        methods = ["GET", "HEAD"] if route.method == "GET" else [route.method]  # the server leaves the body out
        app.add_api_route(route.path, route.endpoint, methods=methods, response_model=None, dependencies=checks)
    app.add_middleware(
        HttpGuard,
        guard=guard,
        max_body_bytes=max_body_bytes,
        health_paths=[route.path for route in routes if route.health],
        metrics_paths=[route.path for route in routes if route.metrics],
        echo_id=echo_id,
    )
    if cors_origins:  # before the guard: a browser's preflight has no key
        app.add_middleware(
            ExplainingCors,
            allow_origins=list(cors_origins),
            allow_credentials=False,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],  # clients send many headers of their own, which are ignored
            expose_headers=[REQUEST_ID, "retry-after", "inference-header-content-length"],
            max_age=CORS_AGE_S,
        )
    app.add_exception_handler(MotleyError, _motley_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    return app


def _named(request: Request) -> None:
    """Raise NotFound if the path has no model's name, since such a path matches the route too."""
    if not all(request.path_params.values()):
        message = "the path names no model; GET /v1/models tells which is served"
        raise NotFound(message, param="model", code="model_not_found")


def _no_query(request: Request) -> None:
    """Raise InvalidRequest for a query, which would be ignored; `api-version` is allowed, since Azure's clients always
    send it.
    """
    for name in request.query_params:
        if name != _AZURE_VERSION:
            name = name[:MAX_REPR_CHARS]
            raise InvalidRequest(f"{name}: this path takes no query", param=name, code="unknown_parameter")


def _json(request: Request) -> None:
    check_media(request.headers)


def _tensors(request: Request) -> None:
    check_tensors(request.headers)


def _motley_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MotleyError)
    return error_response(error, request.scope["path"])


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(http_error(error.status_code, request.method, request.url.path), request.scope["path"])
    response.headers.update(error.headers or {})
    return response


def _bug(request: Request, error: Exception) -> Response:
    """Return the error for an unexpected exception. Its trace is in the log; the client learns no more."""
    return error_response(internal_error(), request.scope["path"])
