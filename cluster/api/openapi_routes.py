"""Route that serves the OpenAPI description of the interface."""

from __future__ import annotations

from starlette.responses import Response

from ..service_errors import Forbidden
from ..transport.http_server.http_responses import Route, json_response
from ..transport.http_server.openapi import REFUSED, HttpOperation, Operations, openapi_document
from ..transport.http_server.response_content import JsonObject
from . import metrics_routes
from .kserve.rest import kserve_operations
from .kserve.rest.kserve_refused import refused_kserve_routes
from .openai import openai_operations
from .openai.openai_refused import refused_routes

PATH = "/openapi.json"
OPERATIONS: Operations = {
    **openai_operations.OPERATIONS,
    **kserve_operations.OPERATIONS,
    ("GET", PATH): HttpOperation("This document", {"type": "object"}),
    ("GET", metrics_routes.PATH): HttpOperation(
        "The metrics of the whole service, for Prometheus; for an admin's key, or one for metrics",
        {"type": "string"},
        more=(Forbidden,),
        media="text/plain",
    ),
}


REFUSALS: Operations = {
    **{(route.method, route.path): REFUSED for route in refused_routes()},
    **{(route.method, route.path): kserve_operations.REFUSED for route in refused_kserve_routes()},
}


class OpenApiRoutes:
    def __init__(self) -> None:
        self._document: JsonObject = openapi_document({**OPERATIONS, **REFUSALS})

    def routes(self) -> tuple[Route, ...]:
        return (Route("GET", PATH, self._get),)

    async def _get(self) -> Response:
        return json_response(self._document)
