"""Functions that run several awaitables or streams at once, with no task left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


async def run_all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first failure cancels the others and is raised itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield items of all streams as they come, each with its stream's number. Closes them all at the end."""
    if len(streams) == 1:  # no task for each item
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    pending = {asyncio.create_task(next_item(stream)): which for which, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                which = pending.pop(task)
                items = task.result()
                if items:
                    pending[asyncio.create_task(next_item(streams[which]))] = which
                    yield which, items[0]
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


@dataclass(frozen=True, slots=True)
class _StreamEnd:
    error: Exception | None = None


async def fan_in(sources: AsyncIterable[AsyncGenerator[T, None]], *, at_once: int) -> AsyncGenerator[T, None]:
    """Yield items of all sources as they come, from at most `at_once` sources at a time; the others wait unread.

    An item waits for its reader before its source makes another. The first failure, of a source or in
    finding sources, closes the others and is raised itself.
    """
    queue: asyncio.Queue[T | _StreamEnd] = asyncio.Queue(maxsize=1)
    slots = asyncio.Semaphore(at_once)

    async def drain(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put(item)
        finally:
            slots.release()

    async def drain_all() -> None:
        end = _StreamEnd()
        try:
            async with asyncio.TaskGroup() as group:
                async for source in sources:
                    await slots.acquire()
                    group.create_task(drain(source))
        except ExceptionGroup as failures:
            end = _StreamEnd(failures.exceptions[0])
        await queue.put(end)

    running = asyncio.create_task(drain_all())
    try:
        while not isinstance(item := await queue.get(), _StreamEnd):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def next_item(items: AsyncIterable[T]) -> list[T]:
    """Return the next item in a list, or an empty list at the end: a task cannot carry StopAsyncIteration."""
    async for item in items:
        return [item]
    return []
