"""Turns of the event loop: if many clients send at once, bodies of few of them are read in each turn.

An event loop that can read from all of them reads it all before anything else runs. That is some 150 KB from each:
for 1,000 clients a fifth of a second of a processor, in which streams and health checks wait.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 8  # parts of bodies, of up to 256 KiB each: one or two milliseconds


class ReadTurns:
    """Limiter that lets `at_once` waiters go on in each turn of its event loop, first come first."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        self._begins_anew = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a place in a turn; return at once if this turn has one left and nobody waits."""
        if self._left > 0 and not self._waiting:
            self._take()
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        await place

    def _take(self) -> None:
        self._left -= 1
        if not self._begins_anew:
            self._begins_anew = True
            asyncio.get_running_loop().call_soon(self._begin)  # runs in the next turn

    def _begin(self) -> None:
        self._begins_anew, self._left = False, self._at_once
        while self._waiting and self._left > 0:
            place = self._waiting.popleft()
            if not place.done():  # else it was cancelled
                self._take()
                place.set_result(None)
