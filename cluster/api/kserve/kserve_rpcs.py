"""Methods of inference.GRPCInferenceService on the ingress."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from ....replicas.errors import NotFound
from ....replicas.host.distribution import motley_version
from ...protos import kserve_pb2 as pb
from ...transport.caller import Caller
from ...transport.grpc_server.rpc_methods import bidirectional, tells_health, unary
from ..common.fields.unknown_message_fields import refuse_unknown_fields
from . import kserve_messages as wire
from .kserve_protocol import KServeProtocol
from .kserve_stream import Requests, StreamInfer

EXTENSIONS = ("model_configuration", "binary_tensor_data", "parameters", "schedule_policy")  # Triton's names


class KServeRpcs:
    kserve: KServeProtocol

    @unary(pb.ServerLiveResponse)
    @tells_health
    async def ServerLive(self, request: pb.ServerLiveRequest, caller: Caller) -> pb.ServerLiveResponse:
        refuse_unknown_fields(request)
        return pb.ServerLiveResponse(live=True)

    @unary(pb.ServerReadyResponse)
    @tells_health
    async def ServerReady(self, request: pb.ServerReadyRequest, caller: Caller) -> pb.ServerReadyResponse:
        refuse_unknown_fields(request)
        return pb.ServerReadyResponse(ready=not await self.kserve.unready_reason())

    @unary(pb.ModelReadyResponse)
    @tells_health
    async def ModelReady(self, request: pb.ModelReadyRequest, caller: Caller) -> pb.ModelReadyResponse:
        refuse_unknown_fields(request)
        served = self.kserve.serves(request.name, request.version)
        return pb.ModelReadyResponse(ready=served and not await self.kserve.unready_reason())

    @unary(pb.ServerMetadataResponse)
    async def ServerMetadata(self, request: pb.ServerMetadataRequest, caller: Caller) -> pb.ServerMetadataResponse:
        refuse_unknown_fields(request)
        return pb.ServerMetadataResponse(name=wire.PLATFORM, version=motley_version(), extensions=EXTENSIONS)

    @unary(pb.ModelMetadataResponse)
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, caller: Caller) -> pb.ModelMetadataResponse:
        refuse_unknown_fields(request)
        self.kserve.check_model(request.name, request.version)
        return wire.metadata(self.kserve.admitter.info)

    @unary(pb.ModelConfigResponse)
    async def ModelConfig(self, request: pb.ModelConfigRequest, caller: Caller) -> pb.ModelConfigResponse:
        refuse_unknown_fields(request)
        self.kserve.check_model(request.name, request.version)
        return pb.ModelConfigResponse(config=wire.config(self.kserve.admitter.info))

    @unary(pb.RepositoryIndexResponse)
    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, caller: Caller) -> pb.RepositoryIndexResponse:
        refuse_unknown_fields(request)
        if request.repository_name:
            raise NotFound("repository_name: there is one repository, without a name", param="repository_name")
        index = pb.RepositoryIndexResponse()
        for model in await self.kserve.index(ready=request.ready):
            index.models.add(name=model.name, version=model.version, state=model.state, reason=model.reason)
        return index

    @unary(pb.ModelInferResponse)
    async def ModelInfer(self, request: pb.ModelInferRequest, caller: Caller) -> pb.ModelInferResponse:
        infer = wire.infer_request(request)
        return wire.infer_response(await self.kserve.infer(infer, caller), raw=infer.raw)

    @bidirectional
    def ModelStreamInfer(self, requests: Requests, caller: Caller) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        return StreamInfer(self.kserve, caller).responses(requests)
