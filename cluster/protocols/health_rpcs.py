"""grpc.health.v1.Health as methods of the ingress."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from grpc_health.v1 import health_pb2 as pb

from ..caller import Caller
from ..web.rpc import stream, tells_health, unary
from .health import HealthProtocol


class HealthRpcs:
    health: HealthProtocol

    @unary(pb.HealthCheckResponse)
    @tells_health
    async def Check(self, request: pb.HealthCheckRequest, caller: Caller) -> pb.HealthCheckResponse:
        return await self.health.check(request)

    @stream
    @tells_health
    def Watch(self, request: pb.HealthCheckRequest, caller: Caller) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        return self.health.watch(request, caller)

    @unary(pb.HealthListResponse)
    @tells_health
    async def List(self, request: pb.HealthListRequest, caller: Caller) -> pb.HealthListResponse:
        return await self.health.list()
