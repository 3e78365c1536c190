"""The service's one entrance: a method of one line for every RPC and every route."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from grpc_health.v1 import health_pb2
from starlette.requests import Request
from starlette.responses import Response

from ..replicas.generation import read_generation
from ..replicas.hub import resolve_model
from ..replicas.protocol import ReplicaProfile
from ..replicas.tokenizer import Tokenizer
from . import http_app
from .door import Door
from .http import answer
from .protocols import motley_wire as wire
from .protocols.health import HealthProtocol
from .protocols.motley import MotleyProtocol
from .protocols.openai import OpenAIProtocol
from .protos import inference_pb2 as pb
from .router import Router
from .rpc import stream, unary
from .settings import MAX_MESSAGE_BYTES


class Ingress:
    """gRPC methods by the names of their RPCs; HTTP handlers by what they answer.

    Ready when a replica is: it asks the pool what it serves.
    """

    async def __init__(self, model: str, pool: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self.router = Router(pool)
        profile, tokenizer = await asyncio.gather(self.router.profile(), asyncio.to_thread(_tokenizer, model))
        self.door = Door(profile.model, tokenizer, _defaults(model, profile), secrets.token_bytes(16))
        self.motley = MotleyProtocol(self.door, self.router)
        self.openai = OpenAIProtocol(self.door, self.router)
        self.health_protocol = HealthProtocol(self.router)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return http_app.build(self, max_body_bytes=MAX_MESSAGE_BYTES)

    async def drain(self) -> int:
        """Refuse new requests from now on; how many streams are left. For whoever stops the service."""
        self.router.draining = True
        return self.router.num_streams

    # motley.v1.Inference

    @unary(pb.Completion)
    async def Complete(self, request: pb.CompleteRequest, grpc_context: Any) -> pb.Completion:
        return await self.motley.complete(wire.complete_ask(request))

    @stream
    def CompleteStream(
        self, request: pb.CompleteRequest, grpc_context: Any
    ) -> AsyncGenerator[pb.CompletionChunk, None]:
        return self.motley.complete_stream(wire.complete_ask(request))

    @unary(pb.Completion)
    async def Chat(self, request: pb.ChatRequest, grpc_context: Any) -> pb.Completion:
        return await self.motley.complete(wire.chat_ask(request))

    @stream
    def ChatStream(self, request: pb.ChatRequest, grpc_context: Any) -> AsyncGenerator[pb.CompletionChunk, None]:
        return self.motley.complete_stream(wire.chat_ask(request))

    @unary(pb.TokenizeResponse)
    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: Any) -> pb.TokenizeResponse:
        return await self.motley.tokenize(request)

    @unary(pb.DetokenizeResponse)
    async def Detokenize(self, request: pb.DetokenizeRequest, grpc_context: Any) -> pb.DetokenizeResponse:
        return await self.motley.detokenize(request)

    @unary(pb.ListModelsResponse)
    async def ListModels(self, request: pb.ListModelsRequest, grpc_context: Any) -> pb.ListModelsResponse:
        return self.motley.list_models(request)

    @unary(pb.Model)
    async def GetModel(self, request: pb.GetModelRequest, grpc_context: Any) -> pb.Model:
        return self.motley.get_model(request)

    # grpc.health.v1.Health

    @unary(health_pb2.HealthCheckResponse)
    async def Check(self, request: health_pb2.HealthCheckRequest, grpc_context: Any) -> health_pb2.HealthCheckResponse:
        return await self.health_protocol.check(request)

    @stream
    def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        return self.health_protocol.watch(request)

    @unary(health_pb2.HealthListResponse)
    async def List(self, request: health_pb2.HealthListRequest, grpc_context: Any) -> health_pb2.HealthListResponse:
        return await self.health_protocol.list()

    # HTTP

    async def completions(self, request: Request) -> Response:
        return answer(await self.openai.completions(await request.body()))

    async def chat_completions(self, request: Request) -> Response:
        return answer(await self.openai.chat(await request.body()))

    async def models(self) -> Response:
        return answer(self.openai.models())

    async def model(self, name: str) -> Response:
        return answer(self.openai.model(name))

    async def tokenize(self, request: Request) -> Response:
        return answer(await self.openai.tokenize(await request.body()))

    async def detokenize(self, request: Request) -> Response:
        return answer(await self.openai.detokenize(await request.body()))

    async def health(self) -> Response:
        return answer({"status": "ok", "load": asdict(await self.router.load())})


def _tokenizer(model: str) -> Tokenizer:
    return Tokenizer.load(resolve_model(model))


def _defaults(model: str, profile: ReplicaProfile) -> dict[str, Any]:
    """What the checkpoint's generation_config.json says of sampling."""
    info = profile.model
    return read_generation(resolve_model(model), info.vocab_size, info.eos_token_ids).sampling()
