"""One-shot event that ends what waits or streams until then. It is a future: waiting for it needs no task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from .streams import next_of

T = TypeVar("T")

Happening = asyncio.Future[None]


def happening() -> Happening:
    return asyncio.get_running_loop().create_future()


def happen(what: Happening) -> None:
    """Set the event. Setting it again does nothing."""
    if not what.done():
        what.set_result(None)


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Return when one of the futures is done, or after `timeout_s`."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def until(happened: Happening, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield the items until the event is set. Does not close them."""
    step = None
    try:
        while not happened.done():
            step = asyncio.create_task(next_of(items))
            await first_of(step, happened)
            if not step.done() or not (found := step.result()):
                return
            yield found[0]
    finally:
        if step is not None:
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
