"""Requests that can be aborted from another call, by the id that their client gave them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from .streams import next_of

T = TypeVar("T")


class Aborts:
    """What runs, by tenant and client's id. An id may be given twice: then it means both."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], set[asyncio.Event]] = defaultdict(set)

    @contextmanager
    def running(self, tenant: str, client_id: str) -> Iterator[asyncio.Event]:
        """While it runs it can be aborted: then the event is set."""
        key, aborted = (tenant, client_id), asyncio.Event()
        self._running[key].add(aborted)
        try:
            yield aborted
        finally:
            self._running[key].discard(aborted)
            if not self._running[key]:
                del self._running[key]

    def abort(self, tenant: str, client_id: str) -> None:
        """Those of this tenant alone. An id that does not run is ignored: it may just have ended."""
        for aborted in self._running.get((tenant, client_id), ()):
            aborted.set()

    def __len__(self) -> int:
        return sum(map(len, self._running.values()))


async def until(aborted: asyncio.Event, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The items up to the abort. They are not closed here."""
    stop = asyncio.create_task(aborted.wait())
    step = None
    try:
        while not aborted.is_set():
            step = asyncio.create_task(next_of(items))
            await asyncio.wait({step, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not step.done() or not (found := step.result()):
                return
            yield found[0]
    finally:
        tasks = [task for task in (step, stop) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
