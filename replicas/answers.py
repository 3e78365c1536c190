"""Answers to requests that came several in one call: each in one message, as they end.

A call between two processes costs more than a short request. So an ingress that has several at once sends them
together (cluster/routing/bundles.py), and what ends in the same step comes back together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from .errors import EngineFault, MotleyError
from .protocol import Request, StreamMessage

log = logging.getLogger(__name__)

Answer = Callable[[Request], Awaitable[StreamMessage]]
Answered = tuple[int, StreamMessage | MotleyError]  # which of the bundle, and what became of it


class Bundles:
    """Those that one replica has. Lives on the event loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, int], asyncio.Task[StreamMessage]] = {}

    async def answers(
        self, name: str, requests: Sequence[Request], answer: Answer
    ) -> AsyncGenerator[list[Answered], None]:
        """At once an empty list: they have begun. Then what has ended since. Closing it stops those that have not."""
        tasks: dict[asyncio.Task[StreamMessage], int] = {}
        ended: list[Answered] = []
        wake = asyncio.Event()

        def done(task: asyncio.Task[StreamMessage]) -> None:
            number = tasks[task]
            del self._running[name, number]
            ended.append((number, _outcome(task)))
            wake.set()

        for number, request in enumerate(requests):
            task = asyncio.ensure_future(_answer(answer, request))
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
        """Stop that one: nobody waits for it. It may just have ended."""
        task = self._running.get((name, number))
        if task is not None:
            task.cancel()


async def _answer(answer: Answer, request: Request) -> StreamMessage:
    return await answer(request)


def _outcome(task: asyncio.Task[StreamMessage]) -> StreamMessage | MotleyError:
    if task.cancelled():
        return StreamMessage(())  # nobody reads it
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, MotleyError):
        return error
    log.error("a request of several failed", exc_info=error)
    return EngineFault("the replica failed on this request; its log says why", code="engine_fault")
