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

    def __init__(self, retryable: RetryableRequest, request: Request) -> None:
        self.retryable = retryable
        self.request = request
        self.response: asyncio.Future[StreamMessage] = asyncio.get_running_loop().create_future()
        self.batch: _UnaryBatch | None = None

    def fail(self, error: MotleyError) -> None:
        if not self.response.done():
            self.response.set_exception(error)


class _UnaryBatch:
    def __init__(self, items: list[_BatchedRequest], attempt: CallAttempt) -> None:
        self.items = items
        self.attempt = attempt
        self.accepted = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        for item in items:
            item.batch = self
            item.retryable.place(attempt)


class UnaryBatcher:
    """Batcher of the short, unstreamed requests of one ingress.

    pools        makes the calls
    unary_batch  the pools' method `answers`
    abandon      the pools' method of this name
    place        returns an attempt at a replica for the given requests together
    wait_s       longest wait for a replica to be found
    """

    def __init__(
        self, pools: ReplicaPools, unary_batch: PoolMethod, abandon: PoolMethod, place: Place, wait_s: float
    ) -> None:
        self._pools = pools
        self._unary_batch = unary_batch
        self._abandon = abandon
        self._place = place
        self._wait_s = wait_s
        self._waiting: deque[_BatchedRequest] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._abandoning: set[asyncio.Task[None]] = set()

    async def send(self, retryable: RetryableRequest, request: Request, deadline: float) -> StreamMessage:
        """Return the complete answer in one message, and set the attempt of `retryable`.

        Raises MotleyError.

        deadline  end of the wait for the answer, in seconds of the event loop's clock
        """
        item = _BatchedRequest(retryable, request)
        self._waiting.append(item)
        if self._sender is None:
            # In an empty context: in that of the first request, Serve would take all calls for calls of that request.
            self._sender = asyncio.create_task(self._send(), context=contextvars.Context())
        try:
            async with asyncio.timeout_at(None if math.isinf(deadline) else deadline):
                return await item.response
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the answer was complete") from None
        finally:
            if item.response.cancelled():
                self._cancel(item)

    async def _send(self) -> None:
        try:
            while self._waiting:
                items = [self._waiting.popleft() for _ in range(min(MAX_BATCH_REQUESTS, len(self._waiting)))]
                items = [item for item in items if not item.response.done()]
                if not items:
                    continue
                batch = _UnaryBatch(items, self._place([item.request for item in items]))
                batch.task = asyncio.create_task(self._carry(batch))
                with suppress(TimeoutError):
                    async with asyncio.timeout(ACCEPT_S):
                        await batch.accepted.wait()
        finally:
            self._sender = None

    async def _carry(self, batch: _UnaryBatch) -> None:
        items, attempt = batch.items, batch.attempt
        try:
            with self._pools.call(attempt, self._unary_batch, [item.request for item in items]) as response:
                batches: AsyncIterator[ReplicaEnvelope] = aiter(response)
                await attempt.wait(anext(batches, None))
                batch.accepted.set()
                for item in [item for item in items if item.response.cancelled()]:
                    self._cancel(item)
                while (envelope := await attempt.wait(anext(batches, None))) is not None:
                    self._pools.liveness.moved(attempt)
                    self._hand_out(batch, envelope)
            self._fail(batch, Unavailable("the replica's answer broke off", code="replica_lost"))
        except MotleyError as error:
            self._fail(batch, error)
        finally:
            batch.accepted.set()
            self._fail(batch, EngineFault("the request failed inside the service", code="internal_error"))

    @staticmethod
    def _hand_out(batch: _UnaryBatch, envelope: ReplicaEnvelope) -> None:
        items, dispatch = batch.items, batch.attempt.dispatch
        if dispatch is not None:
            dispatch.take()
        for number, error in zip(envelope.failed, envelope.errors, strict=True):
            items[number].fail(error)
        for number, response in zip(envelope.calls, envelope.messages, strict=True):
            if dispatch is not None:
                dispatch.record_stored(response, items[number].request)
            if not items[number].response.done():
                items[number].response.set_result(response)

    @staticmethod
    def _fail(batch: _UnaryBatch, error: MotleyError) -> None:
        for item in batch.items:
            item.fail(error)

    def _cancel(self, item: _BatchedRequest) -> None:
        """Cancel a request that has no reader any more, and the whole call if it was the last one of its batch."""
        batch = item.batch
        if batch is None or batch.task is None or batch.task.done():
            return
        if all(other.response.done() for other in batch.items):
            batch.task.cancel()
        elif batch.accepted.is_set():
            task = asyncio.create_task(
                self._abandon_request(batch, batch.items.index(item)), context=contextvars.Context()
            )
            self._abandoning.add(task)
            task.add_done_callback(self._abandoning.discard)

    async def _abandon_request(self, batch: _UnaryBatch, number: int) -> None:
        attempt = self._pools.attempt(Placement(only=batch.attempt.replica), wait_s=self._wait_s)
        # A failed call means that the replica is gone, and the request with it.
        with suppress(MotleyError), self._pools.call(attempt, self._abandon, batch.attempt.call, number) as response:
            await attempt.wait(response)
