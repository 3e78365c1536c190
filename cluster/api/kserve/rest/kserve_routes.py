"""Routes of KServe's inference protocol over HTTP, and of Triton's extensions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from .....replicas.errors import MotleyError
from .....replicas.host.distribution import motley_version
from ....transport.http_server.http_responses import EventStream, Route, caller_of, json_response
from ....transport.http_server.response_content import EncodedObject, JsonObject, StreamingContent, encode_json
from ...common.fields.json_body import parse_body, refuse_other_fields, take_field
from ...common.fields.wire_names import in_wire_names
from ..kserve_messages import PLATFORM
from ..kserve_protocol import KServeProtocol
from ..kserve_request import InferRequest
from ..kserve_response import InferResponse
from ..kserve_rpcs import EXTENSIONS
from . import kserve_binary, kserve_generate, kserve_json
from .kserve_refused import refused_kserve_routes

_EXTENSIONS = (*EXTENSIONS, "generate", "statistics")


class KServeRoutes:
    """Routes of one KServeProtocol. A model's name may hold slashes."""

    def __init__(self, protocol: KServeProtocol) -> None:
        self._protocol = protocol

    def routes(self) -> tuple[Route, ...]:
        model, versioned = "/v2/models/{name:path}", "/v2/models/{name:path}/versions/{number}"
        return (  # the longer path first: a model's name would match its end
            Route("GET", "/v2", self.server),
            Route("GET", "/v2/health/live", self.live, health=True, any_query=True),
            Route("GET", "/v2/health/ready", self.ready, health=True, any_query=True),
            Route("POST", "/v2/repository/index", self.index, tensors=True),
            *refused_kserve_routes(),
            Route("GET", "/v2/models/stats", self.all_statistics),
            *self._of_model(versioned),
            *self._of_model(model),
        )

    def _of_model(self, path: str) -> tuple[Route, ...]:
        return (
            Route("GET", f"{path}/ready", self.model_ready),
            Route("POST", f"{path}/infer", self.infer, tensors=True),
            Route("POST", f"{path}/generate", self.generate, tensors=True),
            Route("POST", f"{path}/generate_stream", self.generate_stream, tensors=True),
            Route("GET", f"{path}/config", self.config),
            Route("GET", f"{path}/stats", self.model_statistics),
            Route("GET", path, self.model),
        )

    async def server(self) -> Response:
        return json_response({"name": PLATFORM, "version": motley_version(), "extensions": _EXTENSIONS})

    async def live(self) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        await self._protocol.check_ready()
        return json_response({"ready": True})

    async def index(self, request: Request) -> Response:
        body = await request.body()
        fields = parse_body(body, self._protocol.admitter.body_limits()) if body else {}
        refuse_other_fields(fields, ("ready",))
        models = await self._protocol.index(ready=take_field(fields, "ready", bool, False))
        return Response(encode_json([asdict(model) for model in models]), media_type="application/json")

    async def model_ready(self, request: Request) -> Response:
        name, number = _model(request)
        self._protocol.check_model(name, number)
        await self._protocol.check_ready()
        return json_response({"name": name, "ready": True})

    async def model(self, request: Request) -> Response:
        self._protocol.check_model(*_model(request))
        return json_response(kserve_json.metadata(self._protocol.admitter.info))

    async def config(self, request: Request) -> Response:
        self._protocol.check_model(*_model(request))
        return json_response(kserve_json.config(self._protocol.admitter.info))

    async def model_statistics(self, request: Request) -> Response:
        self._protocol.check_model(*_model(request))
        return await self.all_statistics()

    async def all_statistics(self) -> Response:
        return json_response(kserve_json.statistics(self._protocol.admitter.info, self._protocol.statistics))

    async def infer(self, request: Request) -> Response:
        length = request.headers.get(kserve_binary.HEADER)
        head, behind = kserve_binary.split_binary_body(await request.body(), length)
        infer = kserve_json.infer_request(head, *_model(request), self._protocol.admitter.body_limits(), behind)
        body, length_said = kserve_binary.encode_binary_response(
            await self._protocol.infer(infer, caller_of(request)), infer
        )
        if length_said is None:
            return Response(body, media_type="application/json")
        headers = {kserve_binary.HEADER: str(length_said)}
        return Response(body, headers=headers, media_type=kserve_binary.TENSORS)

    async def generate(self, request: Request) -> Response:
        infer, names = await self._generate(request, events=False)
        with in_wire_names(names):
            return json_response(kserve_generate.generate_event(await self._protocol.infer(infer, caller_of(request))))

    async def generate_stream(self, request: Request) -> Response:
        infer, names = await self._generate(request, events=True)
        events = _events(self._protocol.parts(infer, caller_of(request)))
        with in_wire_names(names):  # an error must come before the response begins: wait for the first part
            first = await anext(events)
        return EventStream(StreamingContent(first, events), done=b"", error=_error)

    async def _generate(self, request: Request, *, events: bool) -> tuple[InferRequest, Mapping[str, str]]:
        body, limits = await request.body(), self._protocol.admitter.body_limits()
        return kserve_generate.infer_request(
            body, *_model(request), limits, events=events, unknown=self._protocol.unknown
        )


async def _events(parts: AsyncGenerator[InferResponse, None]) -> AsyncGenerator[list[JsonObject | EncodedObject], None]:
    async with aclosing(parts):
        async for part in parts:
            yield [kserve_generate.generate_event(part)]


def _error(error: MotleyError) -> JsonObject:
    return {"error": error.message}


def _model(request: Request) -> tuple[str, str]:
    """Return name and version from the path; the version may be empty."""
    return request.path_params["name"], request.path_params.get("number", "")
