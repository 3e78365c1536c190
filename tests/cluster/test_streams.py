"""Merging streams leaves no task and no open stream behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from motley.cluster.streams import all_of, merge


class Source:
    def __init__(self, items: list[int], *, fail: bool = False, forever: bool = False) -> None:
        self.items, self.fail, self.forever = items, fail, forever
        self.closed = False

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                yield item
            if self.fail:
                raise ValueError("source")
            if self.forever:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def test_items_keep_their_order_and_their_stream() -> None:
    sources = [Source([1, 2, 3]), Source([]), Source([4])]
    seen: dict[int, list[int]] = {}
    async for which, item in merge([source.stream() for source in sources]):
        seen.setdefault(which, []).append(item)
    assert seen == {0: [1, 2, 3], 2: [4]}
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("how", ["close", "fail", "cancel"])
async def test_every_end_closes_every_stream(how: str) -> None:
    sources = [Source([1], forever=True), Source([2], fail=how == "fail", forever=True)]
    before = asyncio.all_tasks()

    async def read() -> None:
        async with aclosing(merge([source.stream() for source in sources])) as items:
            async for _ in items:
                if how == "close":
                    return

    task = asyncio.create_task(read())
    if how == "cancel":
        while not (sources[0].closed or len(asyncio.all_tasks()) > len(before) + 2):
            await asyncio.sleep(0)
        task.cancel()
    [result] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, {"close": type(None), "fail": ValueError, "cancel": asyncio.CancelledError}[how])
    assert all(source.closed for source in sources)
    assert asyncio.all_tasks() == before


async def test_all_of_raises_the_failure_itself_and_cancels_the_rest() -> None:
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await all_of([wait(), fail()])
    assert cancelled.is_set()
    assert await all_of([asyncio.sleep(0, result) for result in (1, 2)]) == [1, 2]
