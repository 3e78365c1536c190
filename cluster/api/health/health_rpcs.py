"""Methods of grpc.health.v1.Health on the ingress."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from grpc_health.v1 import health_pb2 as pb

from ...transport.caller import Caller
from ...transport.grpc_server.rpc_methods import stream, tells_health, unary
from .health_protocol import HealthProtocol


class HealthRpcs:
    """Methods of grpc.health.v1, as published in grpcio-health-checking: whether a replica's engine steps, or requests
    are held.

    Every service here is as healthy as the pool of replicas, and so is the whole server, whose name is empty.
    """

    health: HealthProtocol

    @unary(pb.HealthCheckResponse)
    @tells_health
    async def Check(self, request: pb.HealthCheckRequest, caller: Caller) -> pb.HealthCheckResponse:
        """Return the status now: SERVING or NOT_SERVING. A service that is not here gives NOT_FOUND."""
        return await self.health.check(request)

    @stream
    @tells_health
    def Watch(self, request: pb.HealthCheckRequest, caller: Caller) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """Stream the status now and whenever it changes, checked every WATCH_PERIOD_S s; SERVICE_UNKNOWN if there is no
        such service. Ends with NOT_SERVING when the service drains. RESOURCE_EXHAUSTED beyond MAX_WATCHES watches at a
        time from one address, and beyond MAX_OF_TENANT of one tenant, or without API keys of all callers.
        """
        return self.health.watch(request, caller)

    @unary(pb.HealthListResponse)
    @tells_health
    async def List(self, request: pb.HealthListRequest, caller: Caller) -> pb.HealthListResponse:
        """Return the status of every service, and under the empty name that of the whole server."""
        return await self.health.list()
