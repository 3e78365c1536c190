"""One-shot event that ends what waits or streams until then. It is a future: waiting for it needs no task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from .async_streams import next_item

T = TypeVar("T")

OneShotEvent = asyncio.Future[None]


def create_event() -> OneShotEvent:
    return asyncio.get_running_loop().create_future()


def set_event(what: OneShotEvent) -> None:
    """Set the event. Setting it again does nothing."""
    if not what.done():
        what.set_result(None)


async def wait_for_first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Return when one of the futures is done, or after `timeout_s`."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def take_until(happened: OneShotEvent, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield the items until the event is set or they end. Does not close the generator.

    The event cancels the wait for an item where it stands, as a timeout does, so that no item takes a task.
    """
    while not happened.done():
        try:
            async with asyncio.timeout(None) as limit:
                found = await _next_until(happened, limit, items)
        except TimeoutError:
            if not limit.expired():
                raise
            return
        if not found:
            return
        yield found[0]


async def _next_until(happened: OneShotEvent, limit: asyncio.Timeout, items: AsyncGenerator[T, None]) -> list[T]:
    waiting = True

    def expire(_: object) -> None:
        if waiting:  # an event of this same moment may have come too late for the callback to be removed
            limit.reschedule(0.0)

    happened.add_done_callback(expire)
    try:
        return await next_item(items)
    finally:
        waiting = False
        happened.remove_done_callback(expire)
