"""Batches of short requests: all that arrive while a replica accepts one batch go together in the next.

A request that comes alone is sent at once, by itself. Under load a request waits only until a replica has accepted the
batch before it, so the busier an ingress is, the more requests share the cost of a call.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from ....replicas.engine.streams.replica_envelope import ReplicaEnvelope
from ....replicas.errors import DeadlineExceeded, EngineFault, MotleyError, Unavailable
from ....replicas.types import Request, StreamMessage
from ...request_errors import error_from_replica
from ..attempt.call_cancellation import cancel_call
from ..attempt.liveness_monitor import CallAttempt, LivenessMonitor
from ..attempt.placement import Placement
from ..attempt.retryable_request import RetryableRequest
from .stream_demultiplexer import REPLICA_CALL_ERRORS

MAX_BATCH_REQUESTS = 16  # maximum requests of a batch, which all go to one replica
ACCEPT_S = 0.05  # longest wait for a replica to accept a batch before the next batch is sent


Place = Callable[[list[Request]], Placement]


class _BatchedRequest:
    """One request of a batch, with the future that its caller awaits."""

    def __init__(self, journey: RetryableRequest, request: Request) -> None:
        self.journey = journey
        self.request = request
        self.answer: asyncio.Future[StreamMessage] = asyncio.get_running_loop().create_future()
        self.bundle: _UnaryBatch | None = None

    def fail(self, error: MotleyError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _UnaryBatch:
    def __init__(self, name: str, items: list[_BatchedRequest], placement: Placement) -> None:
        self.name = name
        self.items = items
        self.placement = placement
        self.accepted = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        for item in items:
            item.bundle, item.journey.placement = self, placement


class UnaryBatcher:
    """Batcher of the short, unstreamed requests of one ingress.

    answers, abandon  the pool's methods of these names
    pulse             watches the calls, and ends those whose replica hangs
    place             chooses a replica for the given requests together
    wait_s            longest wait for a replica to be found
    """

    def __init__(
        self,
        answers: Any,
        abandon: Any,
        pulse: LivenessMonitor,
        place: Callable[[list[Request]], Placement],
        wait_s: float,
    ):
        self._answers = answers
        self._abandon = abandon
        self._pulse = pulse
        self._place = place
        self._wait_s = wait_s
        self._names = (f"{secrets.token_hex(8)}-{number}" for number in itertools.count())
        self._waiting: deque[_BatchedRequest] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def answer(self, journey: RetryableRequest, request: Request, deadline: float) -> StreamMessage:
        """Return the complete answer in one message, and leave the replica's placement in the journey.

        Raises MotleyError.

        deadline  end of the wait for the answer, in seconds of the event loop's clock
        """
        item = _BatchedRequest(journey, request)
        self._waiting.append(item)
        if self._sender is None:
            # In an empty context: in that of the first request, Serve would take all calls for calls of that request.
            self._sender = asyncio.create_task(self._send(), context=contextvars.Context())
        try:
            async with asyncio.timeout_at(None if math.isinf(deadline) else deadline):
                return await item.answer
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the answer was complete") from None
        finally:
            if item.answer.cancelled():
                self._leave(item)

    async def _send(self) -> None:
        try:
            while self._waiting:
                items = [self._waiting.popleft() for _ in range(min(MAX_BATCH_REQUESTS, len(self._waiting)))]
                items = [item for item in items if not item.answer.done()]
                if not items:
                    continue
                bundle = _UnaryBatch(next(self._names), items, self._place([item.request for item in items]))
                bundle.task = asyncio.create_task(self._carry(bundle))
                with suppress(TimeoutError):
                    async with asyncio.timeout(ACCEPT_S):
                        await bundle.accepted.wait()
        finally:
            self._sender = None

    async def _carry(self, bundle: _UnaryBatch) -> None:
        items = bundle.items
        attempt = CallAttempt(bundle.placement, wait_s=self._wait_s)
        response = self._answers.remote(bundle.name, [item.request for item in items], bundle.placement)
        self._pulse.watch(attempt)
        try:
            batches: AsyncIterator[ReplicaEnvelope] = aiter(response)
            await attempt.wait(anext(batches, None))
            bundle.accepted.set()
            for item in [item for item in items if item.answer.cancelled()]:
                self._leave(item)
            while (batch := await attempt.wait(anext(batches, None))) is not None:
                self._pulse.moved(attempt)
                if bundle.placement.visit is not None:
                    bundle.placement.visit.take()
                for number, error in zip(batch.failed, batch.errors, strict=True):
                    items[number].fail(error)
                for number, answer in zip(batch.calls, batch.messages, strict=True):
                    if bundle.placement.visit is not None:
                        bundle.placement.visit.told(answer, items[number].request)
                    if not items[number].answer.done():
                        items[number].answer.set_result(answer)
            self._fail(bundle, Unavailable("the replica's answer broke off", code="replica_lost"))
        except REPLICA_CALL_ERRORS as lost:
            self._fail(bundle, error_from_replica(lost))
        finally:
            bundle.accepted.set()
            self._fail(bundle, EngineFault("the request failed inside the service", code="internal_error"))
            self._pulse.forget(attempt)
            cancel_call(response)

    @staticmethod
    def _fail(bundle: _UnaryBatch, error: MotleyError) -> None:
        for item in bundle.items:
            item.fail(error)

    def _leave(self, item: _BatchedRequest) -> None:
        """Cancel a request that has no reader any more, and the whole call if it was the last one of its batch."""
        bundle = item.bundle
        if bundle is None or bundle.task is None or bundle.task.done():
            return
        if all(other.answer.done() for other in bundle.items):
            bundle.task.cancel()
        elif bundle.accepted.is_set():
            task = asyncio.create_task(self._tell(bundle, bundle.items.index(item)), context=contextvars.Context())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _tell(self, bundle: _UnaryBatch, number: int) -> None:
        placement = Placement(bundle.placement.suspects, only=bundle.placement.replica)
        attempt = CallAttempt(placement, wait_s=self._wait_s)
        response = self._abandon.remote(bundle.name, number, placement)
        self._pulse.watch(attempt)
        try:
            with suppress(
                *REPLICA_CALL_ERRORS
            ):  # a failed call means that the replica is gone, and the request with it
                await attempt.wait(response)
        finally:
            self._pulse.forget(attempt)
            cancel_call(response)
