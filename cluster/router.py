"""Sends a request to a replica and streams its messages back.

One pool for now, whose replicas Serve picks between by their queue; ranking by predicted time goes here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ..replicas.errors import MotleyError, Unavailable
from ..replicas.protocol import ReplicaLoad, ReplicaProfile, Request, StreamMessage
from .errors import from_pool


class Router:
    """Holds the pool's handle. Messages travel by value: Ray's object store would cost a trip each."""

    def __init__(self, pool: Any) -> None:
        self.num_streams = 0
        self.draining = False
        self._generate = pool.options(method_name="generate", stream=True, _by_reference=False)
        self._load = pool.options(method_name="load", _by_reference=False)
        self._profile = pool.options(method_name="profile", _by_reference=False)

    async def stream(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        """Messages of one request. Closing the generator, or cancelling its reader, stops the sequence."""
        self._refuse_if_draining()
        self.num_streams += 1
        response = self._generate.remote(request)
        try:
            async for message in response:
                yield message
        except (MotleyError, RayError, RayServeException) as error:
            raise from_pool(error) from error
        finally:
            response.cancel()
            self.num_streams -= 1

    async def load(self) -> ReplicaLoad:
        """What a replica carries. Raises Unavailable when it is not healthy, or the service is stopping."""
        self._refuse_if_draining()
        try:
            load: ReplicaLoad = await self._call(self._load)
        except MotleyError as error:
            raise Unavailable(error.message, code="unhealthy") from error
        return load

    async def profile(self) -> ReplicaProfile:
        """What the replicas are, as soon as there is one."""
        profile: ReplicaProfile = await self._call(self._profile)
        return profile

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Unavailable("the service is stopping", code="draining")

    async def _call(self, method: Any) -> Any:
        try:
            return await method.remote()
        except (MotleyError, RayError, RayServeException) as error:
            raise from_pool(error) from error
