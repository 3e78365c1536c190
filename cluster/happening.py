"""Something that happens once, and ends what waits or streams until then. A future: waiting for it needs no task."""

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
    """Once is enough, twice does no harm."""
    if not what.done():
        what.set_result(None)


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Return when one of them is done, or it is too late."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def until(happened: Happening, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The items up to then. They are not closed here."""
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
