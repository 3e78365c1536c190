"""Route that serves the OpenAPI description of the interface."""

from __future__ import annotations

from starlette.responses import Response

from ..web.answers import Object
from ..web.http import Route, answer
from ..web.openapi import REFUSED, Operation, Operations, document
from . import kserve_docs, openai_docs
from .kserve_refused import refused_kserve_routes
from .openai_refused import refused_routes

PATH = "/openapi.json"
OPERATIONS: Operations = {
    **openai_docs.OPERATIONS,
    **kserve_docs.OPERATIONS,
    ("GET", PATH): Operation("This document", {"type": "object"}),
}


REFUSALS: Operations = {
    **{(route.method, route.path): REFUSED for route in refused_routes()},
    **{(route.method, route.path): kserve_docs.REFUSED for route in refused_kserve_routes()},
}


class OpenApiRoutes:
    def __init__(self) -> None:
        self._document: Object = document({**OPERATIONS, **REFUSALS})

    def routes(self) -> tuple[Route, ...]:
        return (Route("GET", PATH, self._get),)

    async def _get(self) -> Response:
        return answer(self._document)
