"""A reader that waits for a replica is interrupted once, and only while it waits."""

import asyncio

import pytest
from call_attempts import an_attempt

from motley.replicas.errors import Unavailable

LOST = Unavailable("gone", code="replica_stalled")


def run(scenario):
    async def bounded():
        return await asyncio.wait_for(scenario(), 10)

    return asyncio.run(bounded())


async def never():
    await asyncio.Event().wait()


def soon(function, *args):
    asyncio.get_running_loop().call_soon(function, *args)


def test_what_interrupts_is_raised():
    async def scenario():
        attempt = an_attempt()
        soon(attempt.interrupt, LOST)
        with pytest.raises(Unavailable, match="gone"):
            await attempt.wait(never())
        assert not attempt.waiting
        assert asyncio.current_task().cancelling() == 0

    run(scenario)


def test_in_a_task_that_was_cancelled_once_and_went_on():
    async def reader():
        asyncio.current_task().cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        attempt = an_attempt()
        soon(attempt.interrupt, LOST)
        with pytest.raises(Unavailable, match="gone"):
            await attempt.wait(never())
        assert asyncio.current_task().cancelling() == 1

    async def scenario():
        await asyncio.create_task(reader())

    run(scenario)


@pytest.mark.parametrize("first", ["cancel", "interrupt"])
def test_a_reader_that_leaves_at_that_moment_is_cancelled(first):
    async def scenario():
        attempt = an_attempt()
        reader = asyncio.create_task(attempt.wait(never()))
        await asyncio.sleep(0)
        if first == "interrupt":
            attempt.interrupt(LOST)
            await asyncio.sleep(0)
            reader.cancel()
        else:
            reader.cancel()
            attempt.interrupt(LOST)
        with pytest.raises(asyncio.CancelledError):
            await reader

    run(scenario)


def test_an_interruption_that_came_with_the_answer_is_for_the_next():
    async def scenario():
        attempt = an_attempt()
        answer = asyncio.get_running_loop().create_future()

        def both():
            answer.set_result("an answer")
            attempt.interrupt(LOST)

        soon(both)
        assert await attempt.wait(answer) == "an answer"
        with pytest.raises(Unavailable, match="gone"):
            await attempt.wait(never())

    run(scenario)


def test_nobody_who_does_not_wait_is_interrupted():
    async def scenario():
        attempt = an_attempt()
        attempt.interrupt(LOST)
        assert await attempt.wait(asyncio.sleep(0, "an answer")) == "an answer"

    run(scenario)
