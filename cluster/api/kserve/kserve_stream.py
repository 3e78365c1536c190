"""Handler of one ModelStreamInfer call: answers its requests concurrently, as they arrive."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from dataclasses import replace

from ....replicas.errors import MotleyError, Unavailable
from ...async_streams import fan_in, next_item
from ...one_shot_event import wait_for_first
from ...protos import kserve_pb2 as pb
from ...request_errors import internal_error
from ...transport.caller import Caller
from . import kserve_messages as wire
from .kserve_protocol import KServeProtocol, failed_response

log = logging.getLogger(__name__)
MAX_AT_ONCE = 128  # requests of one call that run at a time; further ones wait unread
IDLE_CHECK_S = 1.0  # while the service stops: how often an idle call checks whether all is answered

Requests = AsyncIterable[pb.ModelInferRequest]
Responses = AsyncGenerator[pb.ModelStreamInferResponse, None]


class StreamInfer:
    """A ModelStreamInfer call. `responses` ends when the client has sent its last request and all are answered.

    An error of one request, or of the service while it runs, is a response. What fails while the next request is
    received is raised: InvalidRequest for bytes that do not parse, and Unavailable when the service stops and all is
    answered.
    """

    def __init__(self, protocol: KServeProtocol, caller: Caller) -> None:
        self._protocol = protocol
        self._caller = caller
        self._began = asyncio.get_running_loop().time()
        self._open = 0  # requests not yet answered

    async def responses(self, requests: Requests) -> Responses:
        async with aclosing(fan_in(self._response_streams(requests), at_once=MAX_AT_ONCE)) as responses:
            async for response in responses:
                yield response

    async def _response_streams(self, requests: Requests) -> AsyncGenerator[Responses, None]:
        """Yield for each request the stream of its responses, not yet started."""
        async with aclosing(self._until_stopping(requests)) as received:
            async for request in received:
                self._open += 1
                yield self._respond(request)

    async def _until_stopping(self, requests: Requests) -> AsyncGenerator[pb.ModelInferRequest, None]:
        """Yield the requests until the service stops: an idle call must not keep it from stopping."""
        reading = asyncio.create_task(next_item(requests))
        try:
            while True:
                stopping = self._protocol.stopping
                await wait_for_first(reading, *(() if stopping.done() else (stopping,)), timeout_s=IDLE_CHECK_S)
                if reading.done():
                    if not (found := reading.result()):
                        return
                    yield found[0]
                    reading = asyncio.create_task(next_item(requests))
                elif stopping.done() and not self._open:
                    raise Unavailable("the service is stopping", code="draining")
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _respond(self, request: pb.ModelInferRequest) -> Responses:
        try:
            infer = wire.infer_request(request)
            async with aclosing(self._protocol.infer_stream(infer, self._caller_now())) as responses:
                async for response in responses:
                    yield wire.stream_response(response, raw=infer.raw)
        except MotleyError as error:
            yield wire.stream_response(failed_response(request.id, error), raw=True)
        except Exception:  # a bug that one request meets must not end the others
            log.exception("A request of ModelStreamInfer failed because of an error inside the service.")
            yield wire.stream_response(failed_response(request.id, internal_error()), raw=True)
        finally:
            self._open -= 1

    def _caller_now(self) -> Caller:
        """Return the caller with the time that is left: the call's deadline holds for all its requests."""
        timeout_s = self._caller.timeout_s
        if timeout_s is not None:
            timeout_s -= asyncio.get_running_loop().time() - self._began
        return replace(self._caller, timeout_s=timeout_s, arrived_s=time.monotonic())
