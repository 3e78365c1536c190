"""Responses to requests that came several in one call: each is one message, sent as soon as it ends.

A call between two processes costs more than a short request. So an ingress that has several requests at once sends them
together (cluster/routing/streaming/unary_batching.py), and responses that end in the same step come back together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from ...errors import EngineFault, MotleyError
from ...types import Request, StreamMessage

log = logging.getLogger(__name__)

RespondToRequest = Callable[[Request], Awaitable[StreamMessage]]
NumberedResponse = tuple[
    int, StreamMessage | MotleyError
]  # index of the request in the bundle, and its response or error


class PendingUnaryBatches:
    """Bundles of requests that one replica is computing, each sent in one call. Lives on the event loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, int], asyncio.Task[StreamMessage]] = {}

    async def answers(
        self, name: str, requests: Sequence[Request], answer: RespondToRequest
    ) -> AsyncGenerator[list[NumberedResponse], None]:
        """Compute a bundle's requests and stream the responses that have ended since the last message.

        The first message is an empty list, and says that the requests have begun. Closing the stream cancels those that
        have not ended.
        """
        tasks: dict[asyncio.Task[StreamMessage], int] = {}
        ended: list[NumberedResponse] = []
        wake = asyncio.Event()

        def done(task: asyncio.Task[StreamMessage]) -> None:
            number = tasks[task]
            del self._running[name, number]
            ended.append((number, _outcome(task)))
            wake.set()

        for number, request in enumerate(requests):
            task = asyncio.ensure_future(_respond(answer, request))
            tasks[task] = number
            self._running[name, number] = task
            task.add_done_callback(done)
        left = len(tasks)
        try:
            yield []
            while left:
                await wake.wait()
                wake.clear()
                ready, ended = ended, []
                left -= len(ready)
                yield ready
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def abandon(self, name: str, number: int) -> None:
        """Cancel one request of a bundle, since its client has gone. It may just have ended."""
        task = self._running.get((name, number))
        if task is not None:
            task.cancel()


async def _respond(answer: RespondToRequest, request: Request) -> StreamMessage:
    return await answer(request)


def _outcome(task: asyncio.Task[StreamMessage]) -> StreamMessage | MotleyError:
    if task.cancelled():
        return StreamMessage(())  # the client has gone and reads no response
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, MotleyError):
        return error
    log.error("A request of a batch of unary calls failed", exc_info=error)
    return EngineFault("the replica failed on this request; its log says why", code="engine_fault")
