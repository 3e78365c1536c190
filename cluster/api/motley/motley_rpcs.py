"""Methods of motley.v1.Inference on the ingress, by the names of their RPCs."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from ...protos import inference_pb2 as pb
from ...transport.caller import Caller
from ...transport.grpc_server.rpc_methods import stream, unary
from .motley_protocol import MotleyProtocol


class MotleyRpcs:
    motley: MotleyProtocol

    @unary(pb.Completion)
    async def Complete(self, request: pb.CompleteRequest, caller: Caller) -> pb.Completion:
        return await self.motley.complete(request, caller)

    @stream
    def CompleteStream(self, request: pb.CompleteRequest, caller: Caller) -> AsyncGenerator[pb.CompletionChunk, None]:
        return self.motley.complete_stream(request, caller)

    @unary(pb.Completion)
    async def Chat(self, request: pb.ChatRequest, caller: Caller) -> pb.Completion:
        return await self.motley.chat(request, caller)

    @stream
    def ChatStream(self, request: pb.ChatRequest, caller: Caller) -> AsyncGenerator[pb.CompletionChunk, None]:
        return self.motley.chat_stream(request, caller)

    @unary(pb.EmbeddingsResponse)
    async def Embeddings(self, request: pb.EmbeddingsRequest, caller: Caller) -> pb.EmbeddingsResponse:
        return await self.motley.embeddings(request, caller)

    @unary(pb.TokenizeResponse)
    async def Tokenize(self, request: pb.TokenizeRequest, caller: Caller) -> pb.TokenizeResponse:
        return await self.motley.tokenize(request)

    @unary(pb.DetokenizeResponse)
    async def Detokenize(self, request: pb.DetokenizeRequest, caller: Caller) -> pb.DetokenizeResponse:
        return await self.motley.detokenize(request)

    @unary(pb.ListModelsResponse)
    async def ListModels(self, request: pb.ListModelsRequest, caller: Caller) -> pb.ListModelsResponse:
        return self.motley.list_models(request)

    @unary(pb.Model)
    async def GetModel(self, request: pb.GetModelRequest, caller: Caller) -> pb.Model:
        return self.motley.get_model(request)
