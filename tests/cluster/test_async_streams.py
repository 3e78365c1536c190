"""Merging streams leaves no task and no open stream behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from motley.cluster.async_streams import fan_in, merge_streams, run_all


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


def tasks() -> set[asyncio.Task[object]]:
    """Tasks of this file and of async_streams.py: the loop is shared with other tests' servers."""
    codes = {task: getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks()}
    return {task for task, code in codes.items() if code and Path(code.co_filename).name.endswith("streams.py")}


async def test_items_keep_their_order_and_their_stream() -> None:
    sources = [Source([1, 2, 3]), Source([]), Source([4])]
    seen: dict[int, list[int]] = {}
    async for which, item in merge_streams([source.stream() for source in sources]):
        seen.setdefault(which, []).append(item)
    assert seen == {0: [1, 2, 3], 2: [4]}
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("how", ["end", "close", "fail", "cancel"])
async def test_one_stream_needs_no_task_and_is_closed_at_every_end(how: str) -> None:
    source = Source([1, 2, 3], fail=how == "fail", forever=how == "cancel")
    before = tasks()
    last = asyncio.Event()

    async def read() -> None:
        async with aclosing(merge_streams([source.stream()])) as items:
            async for which, item in items:
                assert which == 0
                assert len(tasks() - before) == 1, "the reader's own"
                if item == 3:
                    last.set()
                if how == "close":
                    return

    task = asyncio.create_task(read())
    if how == "cancel":
        await last.wait()
        task.cancel()
    [result] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, {"fail": ValueError, "cancel": asyncio.CancelledError}.get(how, type(None)))
    assert source.closed
    assert tasks() == before


@pytest.mark.parametrize("how", ["close", "fail", "cancel"])
async def test_every_end_closes_every_stream(how: str) -> None:
    sources = [Source([1], forever=True), Source([2], fail=how == "fail", forever=True)]
    before = tasks()

    async def read() -> None:
        async with aclosing(merge_streams([source.stream() for source in sources])) as items:
            async for _ in items:
                if how == "close":
                    return

    task = asyncio.create_task(read())
    if how == "cancel":
        while not (sources[0].closed or len(tasks()) > len(before) + 2):
            await asyncio.sleep(0)
        task.cancel()
    [result] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, {"close": type(None), "fail": ValueError, "cancel": asyncio.CancelledError}[how])
    assert all(source.closed for source in sources)
    assert tasks() == before


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
        await run_all([wait(), fail()])
    assert cancelled.is_set()
    assert await run_all([asyncio.sleep(0, result) for result in (1, 2)]) == [1, 2]


async def each(*sources: Source) -> AsyncGenerator[AsyncGenerator[int, None], None]:
    for source in sources:
        yield source.stream()


async def test_sources_that_come_one_by_one_are_read_side_by_side() -> None:
    sources = [Source([1, 2, 3]), Source([]), Source([4, 5])]
    items = [item async for item in fan_in(each(*sources), at_once=2)]
    assert sorted(items) == [1, 2, 3, 4, 5]
    assert [item for item in items if item < 4] == [1, 2, 3]
    assert all(source.closed for source in sources)


async def test_no_more_sources_are_open_at_once_than_allowed() -> None:
    open_now = most = 0

    async def source() -> AsyncGenerator[int, None]:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        yield 1
        open_now -= 1

    async def sources() -> AsyncGenerator[AsyncGenerator[int, None], None]:
        for _ in range(9):
            yield source()

    assert len([item async for item in fan_in(sources(), at_once=2)]) == 9
    assert most == 2


@pytest.mark.parametrize("number", [0, 1])
async def test_a_failure_of_one_source_closes_all(number: int) -> None:
    sources = [Source([1], forever=True), Source([1], forever=True)]
    sources[number].fail, sources[number].forever = True, False
    with pytest.raises(ValueError, match="source"):
        _ = [item async for item in fan_in(each(*sources), at_once=2)]
    assert all(source.closed for source in sources)


async def test_a_reader_who_goes_closes_all() -> None:
    sources = [Source([1], forever=True), Source([1], forever=True)]
    before = tasks()
    async with aclosing(fan_in(each(*sources), at_once=2)) as items:
        await anext(items)
        await anext(items)
    assert all(source.closed for source in sources)
    assert tasks() == before


async def test_a_failure_in_finding_sources_closes_those_found() -> None:
    source = Source([1], forever=True)

    async def sources() -> AsyncGenerator[AsyncGenerator[int, None], None]:
        yield source.stream()
        await asyncio.sleep(0.01)
        raise ValueError("finding")

    with pytest.raises(ValueError, match="finding"):
        _ = [item async for item in fan_in(sources(), at_once=2)]
    assert source.closed
