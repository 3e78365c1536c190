"""Responses to requests that came several in one call: each is one message, sent as soon as it ends.

A call between two processes costs more than a short request. So an ingress that has several requests at once sends them
together (cluster/routing/streaming/unary_batching.py), and responses that end in the same step come back together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from ...errors import EngineFault, MotleyError
from ...types import CallId, Request, StreamMessage
from .replica_envelope import ReplicaEnvelope

log = logging.getLogger(__name__)

RespondToRequest = Callable[[Request], Awaitable[StreamMessage]]
ResponseTask = asyncio.Task[StreamMessage]
Outcome = StreamMessage | MotleyError


class PendingUnaryBatches:
    """Batches of requests that one replica is computing, each sent in one call. Lives on the event loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[CallId, int], ResponseTask] = {}

    async def respond_batch(
        self, call: CallId, requests: Sequence[Request], respond: RespondToRequest
    ) -> AsyncGenerator[ReplicaEnvelope, None]:
        """Compute a batch of requests and stream the responses that have ended since the last envelope; their calls are
        numbered as the requests are.

        The first envelope is empty, and says that the requests have begun. Closing the stream cancels those that have
        not ended.
        """
        tasks: dict[ResponseTask, int] = {}
        ended: dict[int, Outcome] = {}  # by number of the request
        wake = asyncio.Event()

        def done(task: ResponseTask) -> None:
            number = tasks[task]
            del self._running[call, number]
            ended[number] = _outcome(task)
            wake.set()

        for number, request in enumerate(requests):
            task = asyncio.ensure_future(_respond(respond, request))
            tasks[task] = number
            self._running[call, number] = task
            task.add_done_callback(done)
        left = len(tasks)
        try:
            yield ReplicaEnvelope()
            while left:
                await wake.wait()
                wake.clear()
                ready, ended = ended, {}
                left -= len(ready)
                yield _envelope(ready)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def abandon(self, call: CallId, number: int) -> None:
        """Cancel one request of a batch, since its client has gone. It may just have ended."""
        task = self._running.get((call, number))
        if task is not None:
            task.cancel()


async def _respond(respond: RespondToRequest, request: Request) -> StreamMessage:
    return await respond(request)


def _envelope(ended: dict[int, Outcome]) -> ReplicaEnvelope:
    responses = {number: outcome for number, outcome in ended.items() if not isinstance(outcome, MotleyError)}
    errors = {number: outcome for number, outcome in ended.items() if isinstance(outcome, MotleyError)}
    return ReplicaEnvelope(tuple(responses.values()), tuple(responses), tuple(errors.values()), tuple(errors))


def _outcome(task: ResponseTask) -> Outcome:
    if task.cancelled():
        return StreamMessage(())  # the client has gone and reads no response
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, MotleyError):
        return error
    log.error("A request of a batch of unary calls failed", exc_info=error)
    return EngineFault("the replica failed on this request; its log says why", code="engine_fault")
