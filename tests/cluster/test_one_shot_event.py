"""Events that end what streams: the rest of the stream is cancelled where it waits, and no item takes a task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from motley.cluster.one_shot_event import create_event, set_event, take_until


class Numbers:
    """Stream of three numbers, which then waits for ever; notes how its waits ended, and the tasks that ran it."""

    def __init__(self) -> None:
        self.cancelled = False
        self.tasks: set[object] = set()

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(3):
                await asyncio.sleep(0)
                self.tasks.add(asyncio.current_task())
                yield number
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_an_event_ends_the_wait_for_an_item() -> None:
    happened, numbers, found = create_event(), Numbers(), []
    async with aclosing(take_until(happened, numbers.items())) as taken:
        async for number in taken:
            found.append(number)
            if number == 2:
                asyncio.get_running_loop().call_later(0.01, set_event, happened)
    assert found == [0, 1, 2]
    assert numbers.cancelled
    assert numbers.tasks == {asyncio.current_task()}


async def test_an_event_between_two_items_ends_the_stream() -> None:
    happened, found = create_event(), []
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with aclosing(take_until(happened, Numbers().items())) as taken:
        async for number in taken:
            found.append(number)
            if number == 1:
                set_event(happened)
                await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert (found, errors) == ([0, 1], [])


async def test_an_event_in_the_moment_of_an_item_is_no_error() -> None:
    happened, errors = create_event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    async def items() -> AsyncGenerator[int, None]:
        await asyncio.sleep(0)
        set_event(happened)
        yield 1
        yield 2

    found = [number async for number in take_until(happened, items())]
    await asyncio.sleep(0.01)
    assert (found, errors) == ([1], [])


@pytest.mark.parametrize("error", [TimeoutError, ValueError])
async def test_errors_of_the_stream_pass(error: type[Exception]) -> None:
    async def items() -> AsyncGenerator[int, None]:
        yield 1
        raise error

    with pytest.raises(error):
        _ = [number async for number in take_until(create_event(), items())]


async def test_whoever_is_cancelled_is_not_told_that_the_event_came() -> None:
    numbers = Numbers()

    async def read() -> None:
        async for _ in take_until(create_event(), numbers.items()):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert numbers.cancelled
