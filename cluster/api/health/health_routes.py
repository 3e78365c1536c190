"""Health over HTTP, for load balancers that do not speak gRPC."""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import Response

from ...routing.router import Router
from ...transport.http_server.http_responses import Route, json_response


class HealthRoutes:
    def __init__(self, router: Router) -> None:
        self._router = router

    def routes(self) -> tuple[Route, ...]:
        paths = ("/health", "/ping")  # /ping is the path of SageMaker, and of vLLM
        return tuple(Route("GET", path, self.health, health=True, any_query=True) for path in paths)

    async def health(self) -> Response:
        load = await self._router.load()
        state = "holding" if self._router.holding else "serving"
        return json_response({"status": "ok", "state": state, "held": self._router.held, "load": asdict(load)})
