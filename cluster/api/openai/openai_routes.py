"""Routes of OpenAI's HTTP protocol, and /tokenize, /detokenize and others that model servers have beside it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ....replicas.host.distribution import motley_version
from ...transport.http_server.http_responses import Route, caller_of, json_response
from .openai_protocol import OpenAIProtocol
from .openai_refused import refused_routes


class OpenAIRoutes:
    """Handlers that answer with what the protocol returns. They raise MotleyError."""

    def __init__(self, protocol: OpenAIProtocol) -> None:
        self._protocol = protocol

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", "/v1/completions", self.completions),
            Route("POST", "/v1/chat/completions", self.chat_completions),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{name:path}", self.model),
            Route("POST", "/tokenize", self.tokenize),
            Route("POST", "/detokenize", self.detokenize),
            Route("GET", "/tokenizer_info", self.tokenizer_info),
            Route("GET", "/version", self.version),
            *refused_routes(),
        )

    async def completions(self, request: Request) -> Response:
        return json_response(await self._protocol.completions(await request.body(), caller_of(request)))

    async def chat_completions(self, request: Request) -> Response:
        return json_response(await self._protocol.chat(await request.body(), caller_of(request)))

    async def models(self) -> Response:
        return json_response(self._protocol.models())

    async def model(self, name: str) -> Response:
        return json_response(self._protocol.model(name))

    async def tokenize(self, request: Request) -> Response:
        return json_response(await self._protocol.tokenize(await request.body()))

    async def tokenizer_info(self) -> Response:
        return json_response(self._protocol.tokenizer_info())

    async def version(self) -> Response:
        return json_response({"version": motley_version()})

    async def detokenize(self, request: Request) -> Response:
        return json_response(await self._protocol.detokenize(await request.body()))
