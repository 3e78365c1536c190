"""The description of the interface, served beside it."""

from __future__ import annotations

from starlette.responses import Response

from ..web.answers import Object
from ..web.http import Route, answer
from ..web.openapi import Operation, Operations, document
from . import kserve_docs, openai_docs

PATH = "/openapi.json"
OPERATIONS: Operations = {
    **openai_docs.OPERATIONS,
    **kserve_docs.OPERATIONS,
    ("GET", PATH): Operation("This document", {"type": "object"}),
}


class OpenApiRoutes:
    def __init__(self) -> None:
        self._document: Object = document(OPERATIONS)

    def routes(self) -> tuple[Route, ...]:
        return (Route("GET", PATH, self._get),)

    async def _get(self) -> Response:
        return answer(self._document)
