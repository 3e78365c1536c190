"""Methods of vllm.grpc.engine.VllmEngine on the ingress."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from ...protos import vllm_common_pb2 as common
from ...protos import vllm_engine_pb2 as pb
from ...request_errors import NotImplementedHere
from ...routing.ingress_broadcast import broadcast_to_ingresses
from ...transport.caller import Caller
from ...transport.grpc_server.rpc_methods import stream, tells_health, unary
from ..common.fields.unknown_message_fields import refuse_unknown_fields
from .tokenizer_archive import TokenizerArchive
from .vllm_protocol import VllmProtocol


class VllmRpcs:
    vllm: VllmProtocol
    tokenizer_archive: TokenizerArchive

    @stream
    def Generate(self, request: pb.GenerateRequest, caller: Caller) -> AsyncGenerator[pb.GenerateResponse, None]:
        return self.vllm.generate(request, caller)

    @unary(pb.EmbedResponse)
    async def Embed(self, request: pb.EmbedRequest, caller: Caller) -> pb.EmbedResponse:
        return await self.vllm.embed(request, caller)

    @unary(pb.HealthCheckResponse)
    @tells_health
    async def HealthCheck(self, request: pb.HealthCheckRequest, caller: Caller) -> pb.HealthCheckResponse:
        refuse_unknown_fields(request)
        return await self.vllm.health()

    @unary(pb.AbortResponse)
    async def Abort(self, request: pb.AbortRequest, caller: Caller) -> pb.AbortResponse:
        ids = self.vllm.abort(request, caller)
        await broadcast_to_ingresses("abort_requests", caller.tenant, ids)
        return pb.AbortResponse()

    async def abort_requests(self, tenant: str, client_ids: list[str]) -> None:
        """Abort those of the requests that run on this ingress. Another ingress calls it, since a client cannot know
        which one has its request.
        """
        self.vllm.abort_locally(tenant, client_ids)

    @unary(pb.GetModelInfoResponse)
    async def GetModelInfo(self, request: pb.GetModelInfoRequest, caller: Caller) -> pb.GetModelInfoResponse:
        refuse_unknown_fields(request)
        return self.vllm.model_info()

    @unary(pb.GetServerInfoResponse)
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, caller: Caller) -> pb.GetServerInfoResponse:
        refuse_unknown_fields(request)
        return self.vllm.server_info()

    @unary(pb.GetLoadsResponse)
    async def GetLoads(self, request: pb.GetLoadsRequest, caller: Caller) -> pb.GetLoadsResponse:
        return await self.vllm.loads(request)

    @stream
    def GetTokenizer(
        self, request: common.GetTokenizerRequest, caller: Caller
    ) -> AsyncGenerator[common.GetTokenizerChunk, None]:
        refuse_unknown_fields(request)
        return self.tokenizer_archive.chunks()

    @unary(common.FlushCacheResponse)
    async def FlushCache(self, request: common.FlushCacheRequest, caller: Caller) -> common.FlushCacheResponse:
        return await self.vllm.flush(request, caller)

    @stream
    def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, caller: Caller
    ) -> AsyncGenerator[common.KvEventBatch, None]:
        return self.vllm.kv_events(request, caller)

    @unary(common.ProfileResponse)
    async def StartProfile(self, request: common.StartProfileRequest, caller: Caller) -> common.ProfileResponse:
        raise NotImplementedHere(_NO_PROFILER, code="not_implemented")

    @unary(common.ProfileResponse)
    async def StopProfile(self, request: common.StopProfileRequest, caller: Caller) -> common.ProfileResponse:
        raise NotImplementedHere(_NO_PROFILER, code="not_implemented")


_NO_PROFILER = "this service has no profiler to start"
