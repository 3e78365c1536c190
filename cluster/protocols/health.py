"""grpc.health.v1: whether requests are served or held, in the words that load balancers and Kubernetes know."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from grpc_health.v1 import health_pb2 as pb

from ...replicas.errors import MotleyError, NotFound, Overloaded
from ..caller import Caller
from ..happening import Happening, first_of
from ..web import servicers

SERVICES = ("", *(service.full_name for service in servicers.SERVICES))  # the empty name is the whole server
WATCH_PERIOD_S = 1.0
MAX_WATCHES = 16  # at a time from one address, and
MAX_OF_TENANT = 256  # of one tenant, or without keys of all together
_ALL = "*"  # no address
_SERVING = pb.HealthCheckResponse.ServingStatus.SERVING
_NOT_SERVING = pb.HealthCheckResponse.ServingStatus.NOT_SERVING
_UNKNOWN = pb.HealthCheckResponse.ServingStatus.SERVICE_UNKNOWN


class Life(Protocol):
    """What is asked for health: the router, or another that can say."""

    @property
    def draining(self) -> bool: ...

    @property
    def stopping(self) -> Happening: ...

    async def load(self) -> object:
        """Raises MotleyError when it is not well."""
        ...


class HealthProtocol:
    """A service is as healthy as the pool: a live process whose engine does not step is not. One without replicas is
    while it holds requests for the first that comes: a balancer that took it out would keep it from ever waking.

    However many ask, a replica is asked once at a time, and no more often than each WATCH_PERIOD_S for all
    watchers together. Whoever watches is no load: the drain does not wait for them, they wait for it.
    """

    def __init__(self, router: Life, services: Sequence[str] = SERVICES) -> None:
        self._router = router
        self._services = services
        self._watches: Counter[tuple[str, str]] = Counter()  # by tenant and address; by tenant alone
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
        """The status now, and again whenever it changes; of an unknown service too, which may yet appear.

        Ends with NOT_SERVING as soon as the service drains. Raises Overloaded beyond MAX_WATCHES and MAX_OF_TENANT.
        """
        places = {(caller.tenant, caller.peer): MAX_WATCHES, (caller.tenant, _ALL): MAX_OF_TENANT}
        for place, most in places.items():
            if self._watches[place] >= most:
                raise Overloaded(f"at most {most} watches at a time", code="too_many_watches")
        self._watches.update(places.keys())
        try:
            last = None
            while True:
                draining = self._router.draining  # before the answer: what comes last says NOT_SERVING
                known = request.service in self._services
                response = _response(await self._shared()) if known else pb.HealthCheckResponse(status=_UNKNOWN)
                if response != last:
                    yield response
                last = response
                if draining:
                    return
                await first_of(self._router.stopping, timeout_s=WATCH_PERIOD_S)
        finally:
            self._watches.subtract(places.keys())
            self._watches = +self._watches  # addresses come and go

    async def _shared(self) -> bool:
        """An answer that may be WATCH_PERIOD_S old."""
        if not self._router.draining and time.monotonic() - self._polled < WATCH_PERIOD_S:
            return self._well
        return await self._fresh()

    async def _fresh(self) -> bool:
        """An answer of now, to all who ask while it is on its way. No when the service drains, whoever is asked."""
        if self._poll is None:
            self._poll = asyncio.create_task(self._ask())
        poll = self._poll
        await first_of(poll, self._router.stopping)
        return not self._router.draining and poll.result()

    async def _ask(self) -> bool:
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
