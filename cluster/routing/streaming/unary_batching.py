"""Batches of short requests: all that arrive while a replica accepts one batch go together in the next.

A request that comes alone is sent at once, by itself. Under load a request waits only until a replica has accepted the
batch before it, so the busier an ingress is, the more requests share the cost of a call.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from ....replicas.engine.streams.replica_envelope import ReplicaEnvelope
from ....replicas.errors import DeadlineExceeded, EngineFault, MotleyError, Unavailable
from ....replicas.types import Request, StreamMessage
from ..attempt.call_attempt import CallAttempt
from ..attempt.placement import Placement
from ..attempt.replica_pools import PoolMethod, ReplicaPools
from ..attempt.retryable_request import RetryableRequest

MAX_BATCH_REQUESTS = 16  # maximum requests of a batch, which all go to one replica
ACCEPT_S = 0.05  # longest wait for a replica to accept a batch before the next batch is sent

Place = Callable[[list[Request]], CallAttempt]


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
    def __init__(self, items: list[_BatchedRequest], attempt: CallAttempt) -> None:
        self.items = items
        self.attempt = attempt
        self.accepted = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        for item in items:
            item.bundle, item.journey.attempt = self, attempt


class UnaryBatcher:
    """Batcher of the short, unstreamed requests of one ingress.

    pools             makes the calls
    answers, abandon  the pools' methods of these names
    place             returns an attempt at a replica for the given requests together
    wait_s            longest wait for a replica to be found
    """

    def __init__(
        self, pools: ReplicaPools, answers: PoolMethod, abandon: PoolMethod, place: Place, wait_s: float
    ) -> None:
        self._pools = pools
        self._answers = answers
        self._abandon = abandon
        self._place = place
        self._wait_s = wait_s
        self._waiting: deque[_BatchedRequest] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def answer(self, journey: RetryableRequest, request: Request, deadline: float) -> StreamMessage:
        """Return the complete answer in one message, and leave the attempt in the journey.

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
                bundle = _UnaryBatch(items, self._place([item.request for item in items]))
                bundle.task = asyncio.create_task(self._carry(bundle))
                with suppress(TimeoutError):
                    async with asyncio.timeout(ACCEPT_S):
                        await bundle.accepted.wait()
        finally:
            self._sender = None

    async def _carry(self, bundle: _UnaryBatch) -> None:
        items, attempt = bundle.items, bundle.attempt
        try:
            with self._pools.call(attempt, self._answers, [item.request for item in items]) as response:
                batches: AsyncIterator[ReplicaEnvelope] = aiter(response)
                await attempt.wait(anext(batches, None))
                bundle.accepted.set()
                for item in [item for item in items if item.answer.cancelled()]:
                    self._leave(item)
                while (batch := await attempt.wait(anext(batches, None))) is not None:
                    self._pools.pulse.moved(attempt)
                    self._hand_out(bundle, batch)
            self._fail(bundle, Unavailable("the replica's answer broke off", code="replica_lost"))
        except MotleyError as error:
            self._fail(bundle, error)
        finally:
            bundle.accepted.set()
            self._fail(bundle, EngineFault("the request failed inside the service", code="internal_error"))

    @staticmethod
    def _hand_out(bundle: _UnaryBatch, batch: ReplicaEnvelope) -> None:
        items, dispatch = bundle.items, bundle.attempt.dispatch
        if dispatch is not None:
            dispatch.take()
        for number, error in zip(batch.failed, batch.errors, strict=True):
            items[number].fail(error)
        for number, answer in zip(batch.calls, batch.messages, strict=True):
            if dispatch is not None:
                dispatch.told(answer, items[number].request)
            if not items[number].answer.done():
                items[number].answer.set_result(answer)

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
        attempt = self._pools.attempt(Placement(only=bundle.attempt.replica), wait_s=self._wait_s)
        # A failed call means that the replica is gone, and the request with it.
        with suppress(MotleyError), self._pools.call(attempt, self._abandon, bundle.attempt.call, number) as response:
            await attempt.wait(response)
