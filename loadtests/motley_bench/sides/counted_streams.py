"""Counts of the tokens that concurrent streams have got, for a trace that begins once all of them decode."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from motley.replicas.engine.entrypoints.worker import Worker


class StreamTokenCounts:
    """Counter of the tokens that each stream has got so far."""

    def __init__(self, batch: int) -> None:
        self._made = [0] * batch
        self._woken = asyncio.Event()

    @property
    def min_tokens(self) -> int:
        return min(self._made)

    def count(self, stream: int, tokens: int) -> None:
        self._made[stream] += tokens
        self._woken.set()

    async def reach(self, tokens: int) -> None:
        while self.min_tokens < tokens:
            self._woken.clear()
            await self._woken.wait()


class CountingWorker:
    """Wrapper of a worker that reports the tokens of each stream; streams are numbered in the order of their
    requests.
    """

    def __init__(self, worker: Worker, count: Callable[[int, int], None]) -> None:
        self._worker, self._count = worker, count
        self._numbers = itertools.count()

    async def generate(self, request: Any) -> Any:
        number = next(self._numbers)
        async for message in self._worker.generate(request):
            self._count(number, sum(len(delta.token_ids) for delta in message.deltas))
            yield message


async def unless_over(reached: Any, watched: asyncio.Future[Any]) -> None:
    """Wait for `reached`. Raises what ended the streams if they end before it."""
    waiting = asyncio.ensure_future(reached)
    await asyncio.wait([waiting, watched], return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        watched.result()
        raise RuntimeError("the streams were over before the profiler had seen enough")
