"""Protocol grpc.health.v1: whether requests are served or held, as load balancers and Kubernetes ask for it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from grpc_health.v1 import health_pb2 as pb

from ....replicas.errors import MotleyError, NotFound, Overloaded
from ...one_shot_event import OneShotEvent, wait_for_first
from ...transport.caller import Caller
from ...transport.grpc_server import servicers

SERVICES = ("", *(service.full_name for service in servicers.SERVICES))  # the empty name is the whole server
WATCH_PERIOD_S = 1.0
MAX_WATCHES = 16  # watches at a time from one address
MAX_OF_TENANT = 256  # watches at a time of one tenant; without API keys, of all callers together
_ALL = "*"  # all addresses of a tenant
_SERVING = pb.HealthCheckResponse.ServingStatus.SERVING
_NOT_SERVING = pb.HealthCheckResponse.ServingStatus.NOT_SERVING
_UNKNOWN = pb.HealthCheckResponse.ServingStatus.SERVICE_UNKNOWN


class HealthSource(Protocol):
    """Source of the service's health: the router, or another object that can report it."""

    @property
    def draining(self) -> bool: ...

    @property
    def stopping(self) -> OneShotEvent: ...

    async def load(self) -> object:
        """Return the load. Raises MotleyError when the service is not healthy."""
        ...


class HealthProtocol:
    """Health of each service, which is that of the whole pool of replicas.

    A live process whose engine does not step is not healthy. A pool without replicas is healthy while it holds requests
    for the first replica that joins: a load balancer that took it out would keep it from ever waking.

    However many clients ask, there is one query to the replicas at a time, and no more than one every WATCH_PERIOD_S
    for all watchers together. A watch does not count as load: the drain does not wait for watches, and ends them.
    """

    def __init__(self, router: HealthSource, services: Sequence[str] = SERVICES) -> None:
        self._router = router
        self._services = services
        self._watches: Counter[tuple[str, str]] = Counter()  # number by (tenant, address) and by (tenant, _ALL)
        self._poll: asyncio.Task[bool] | None = None
        self._polled = -math.inf  # monotonic: when the last answer came
        self._well = False

    async def check(self, request: pb.HealthCheckRequest) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            raise NotFound(f"service: there is no {request.service[:80]!r} here", param="service")
        return _response(await self._fresh())

    async def list(self) -> pb.HealthListResponse:
        response = _response(await self._fresh())
        return pb.HealthListResponse(statuses=dict.fromkeys(self._services, response))

    async def watch(
        self, request: pb.HealthCheckRequest, caller: Caller
    ) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """Yield the status now and whenever it changes; for an unknown service too, which may yet appear.

        Ends with NOT_SERVING as soon as the service drains. Raises Overloaded beyond MAX_WATCHES and MAX_OF_TENANT.
        """
        places = {(caller.tenant, caller.peer): MAX_WATCHES, (caller.tenant, _ALL): MAX_OF_TENANT}
        for place, limit in places.items():
            if self._watches[place] >= limit:
                raise Overloaded(f"at most {limit} watches at a time", code="too_many_watches")
        self._watches.update(places.keys())
        try:
            last = None
            while True:
                draining = self._router.draining  # read before the answer, so that the last response says NOT_SERVING
                is_served = request.service in self._services
                response = _response(await self._shared()) if is_served else pb.HealthCheckResponse(status=_UNKNOWN)
                if response != last:
                    yield response
                last = response
                if draining:
                    return
                await wait_for_first(self._router.stopping, timeout_s=WATCH_PERIOD_S)
        finally:
            self._watches.subtract(places.keys())
            self._watches = +self._watches  # drop addresses that watch no more

    async def _shared(self) -> bool:
        """Return whether the pool is healthy, from an answer that may be WATCH_PERIOD_S old."""
        if not self._router.draining and time.monotonic() - self._polled < WATCH_PERIOD_S:
            return self._well
        return await self._fresh()

    async def _fresh(self) -> bool:
        """Return whether the pool is healthy now; all who ask meanwhile share the query. False when the service
        drains.
        """
        if self._poll is None:
            self._poll = asyncio.create_task(self._query_health())
        poll = self._poll
        await wait_for_first(poll, self._router.stopping)
        return not self._router.draining and poll.result()

    async def _query_health(self) -> bool:
        try:
            await self._router.load()
        except MotleyError:
            self._well = False
        else:
            self._well = True
        finally:
            self._poll, self._polled = None, time.monotonic()
        return self._well


def _response(well: bool) -> pb.HealthCheckResponse:
    return pb.HealthCheckResponse(status=_SERVING if well else _NOT_SERVING)
