"""KServe's inference protocol over HTTP."""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from ..web.http import Route, answer, caller_of
from . import kserve_json
from .kserve import KServeProtocol
from .kserve_rpcs import EXTENSIONS
from .kserve_wire import PLATFORM

_EXTENSIONS = [name for name in EXTENSIONS if name != "binary_tensor_data"]  # bodies are JSON alone


class KServeRoutes:
    """A model's name may hold slashes."""

    def __init__(self, protocol: KServeProtocol) -> None:
        self._protocol = protocol

    def routes(self) -> tuple[Route, ...]:
        model, versioned = "/v2/models/{name:path}", "/v2/models/{name:path}/versions/{number}"
        return (  # the longer path first: a name would swallow its end
            Route("GET", "/v2", self.server),
            Route("GET", "/v2/health/live", self.live, health=True, any_query=True),
            Route("GET", "/v2/health/ready", self.ready, health=True, any_query=True),
            Route("GET", f"{versioned}/ready", self.model_ready),
            Route("POST", f"{versioned}/infer", self.infer),
            Route("GET", f"{versioned}/config", self.config),
            Route("GET", versioned, self.model),
            Route("GET", f"{model}/ready", self.model_ready),
            Route("POST", f"{model}/infer", self.infer),
            Route("GET", f"{model}/config", self.config),
            Route("GET", model, self.model),
        )

    async def server(self) -> Response:
        return answer({"name": PLATFORM, "version": version("motley"), "extensions": _EXTENSIONS})

    async def live(self) -> Response:
        return answer({"live": True})

    async def ready(self, request: Request) -> Response:
        await self._protocol.check_ready()
        return answer({"ready": True})

    async def model_ready(self, request: Request) -> Response:
        name, number = _model(request)
        self._protocol.check_model(name, number)
        await self._protocol.check_ready()
        return answer({"name": name, "ready": True})

    async def model(self, request: Request) -> Response:
        self._protocol.check_model(*_model(request))
        return answer(kserve_json.metadata(self._protocol.door.info))

    async def config(self, request: Request) -> Response:
        self._protocol.check_model(*_model(request))
        return answer(kserve_json.config(self._protocol.door.info))

    async def infer(self, request: Request) -> Response:
        infer = kserve_json.infer_request(await request.body(), *_model(request), self._protocol.door.most())
        return answer(kserve_json.infer_response(await self._protocol.infer(infer, caller_of(request))))


def _model(request: Request) -> tuple[str, str]:
    """Name and version; the latter may be absent."""
    return request.path_params["name"], request.path_params.get("number", "")
