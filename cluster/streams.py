"""Several awaitables or streams at once, with no task left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure cancels the others and is raised itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with its stream's number. Closes them all at the end."""
    pending = {asyncio.create_task(_next(stream)): which for which, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                which = pending.pop(task)
                items = task.result()
                if items:
                    pending[asyncio.create_task(_next(streams[which]))] = which
                    yield which, items[0]
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> list[T]:
    """The next item, or nothing at the end: a task cannot carry StopAsyncIteration."""
    async for item in stream:
        return [item]
    return []
