"""grpc.health.v1: whether a replica answers, in the words that load balancers and Kubernetes know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from grpc_health.v1 import health_pb2 as pb

from ...replicas.errors import MotleyError, NotFound
from ..router import Router

SERVICES = ("", "motley.v1.Inference")  # the empty name is the whole server
WATCH_PERIOD_S = 1.0
_SERVING = pb.HealthCheckResponse.ServingStatus.SERVING
_NOT_SERVING = pb.HealthCheckResponse.ServingStatus.NOT_SERVING
_UNKNOWN = pb.HealthCheckResponse.ServingStatus.SERVICE_UNKNOWN


class HealthProtocol:
    """A service is as healthy as the pool: a live process whose engine does not step is not."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def check(self, request: pb.HealthCheckRequest) -> pb.HealthCheckResponse:
        if request.service not in SERVICES:
            raise NotFound(f"service: there is no {request.service[:80]!r} here", param="service")
        return await self._response()

    async def list(self) -> pb.HealthListResponse:
        response = await self._response()
        return pb.HealthListResponse(statuses=dict.fromkeys(SERVICES, response))

    async def watch(self, request: pb.HealthCheckRequest) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """The status now, and again whenever it changes; of an unknown service too, which may yet appear."""
        last = None
        while True:
            known = request.service in SERVICES
            response = await self._response() if known else pb.HealthCheckResponse(status=_UNKNOWN)
            if response != last:
                yield response
            last = response
            if self._router.draining:
                return  # or the watchers would be waited for
            await asyncio.sleep(WATCH_PERIOD_S)

    async def _response(self) -> pb.HealthCheckResponse:
        try:
            await self._router.load()
        except MotleyError:
            return pb.HealthCheckResponse(status=_NOT_SERVING)
        return pb.HealthCheckResponse(status=_SERVING)
