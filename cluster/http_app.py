"""The FastAPI application: routes to the ingress's methods, and errors in OpenAI's form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..replicas.errors import EngineFault, MotleyError
from .errors import http_error
from .http import error_response
from .http_guard import HttpGuard

if TYPE_CHECKING:
    from .ingress import Ingress


def build(ingress: Ingress, *, max_body_bytes: int) -> FastAPI:
    app = FastAPI(title="Motley", docs_url=None, redoc_url=None, openapi_url=None)
    for method, path, endpoint in (
        ("POST", "/v1/completions", ingress.completions),
        ("POST", "/v1/chat/completions", ingress.chat_completions),
        ("GET", "/v1/models", ingress.models),
        ("GET", "/v1/models/{name:path}", ingress.model),
        ("POST", "/tokenize", ingress.tokenize),
        ("POST", "/detokenize", ingress.detokenize),
        ("GET", "/health", ingress.health),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    app.add_middleware(HttpGuard, max_body_bytes=max_body_bytes)
    app.add_exception_handler(MotleyError, _motley_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    return app


def _motley_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MotleyError)
    return error_response(error)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(http_error(error.status_code, request.method, request.url.path))
    response.headers.update(error.headers or {})
    return response


def _bug(request: Request, error: Exception) -> Response:
    """Its trace is in the log; the client learns no more than that."""
    return error_response(EngineFault("the request failed inside the service", code="internal_error"))
