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
    """Yield the items until the event is set or they end. Does not close the generator."""
    step = None
    try:
        while not happened.done():
            step = asyncio.create_task(next_item(items))
            await wait_for_first(step, happened)
            if not step.done() or not (found := step.result()):
                return
            yield found[0]
    finally:
        if step is not None:
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
