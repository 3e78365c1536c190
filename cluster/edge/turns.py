"""Turns: of many clients that send at once, few are read in each turn of the event loop.

A loop that finds something to read from each of them reads it all before anything else is done. That is some 150 KB
of each: of 1,000 clients a fifth of a second of a processor, for which streams wait, and the checks of health.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["AT_ONCE", "Turns"]

AT_ONCE = 8  # parts of bodies, of up to 256 KiB each: one or two milliseconds


class Turns:
    """Lets `at_once` of those who wait go on in each turn of the event loop that it is used in, first come first."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        self._begins_anew = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return at once where there is room in this turn, and nobody waits."""
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
            asyncio.get_running_loop().call_soon(self._begin)  # which is in the next turn

    def _begin(self) -> None:
        self._begins_anew, self._left = False, self._at_once
        while self._waiting and self._left > 0:
            place = self._waiting.popleft()
            if not place.done():  # it has given up
                self._take()
                place.set_result(None)
