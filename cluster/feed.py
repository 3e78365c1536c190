"""The prompts of one call enter as there is room for them: together they may be more than a queue ever holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from ..replicas.errors import Overloaded
from ..replicas.protocol import Request, StreamMessage

AT_ONCE = 32  # prompts of one call: the rest of the room is for others


class Streams(Protocol):
    def stream(self, request: Request, *, whole: bool = False) -> AsyncGenerator[StreamMessage, None]: ...


class Feed:
    """`stream` as the router has it, for the requests of one call.

    A request that is refused for want of room waits until another of this call has ended, and tries again. When
    no other is left, it is others who fill the queue, and Overloaded is raised as for a call of one prompt.
    """

    def __init__(self, router: Streams) -> None:
        self._router = router
        self._room = asyncio.Semaphore(AT_ONCE)
        self._inside = 0  # under way, or being tried
        self._ended = asyncio.Event()  # the next one

    async def stream(self, request: Request, *, whole: bool = False) -> AsyncGenerator[StreamMessage, None]:
        async with self._room:
            while True:
                ended, begun, refused = self._ended, False, False
                self._inside += 1
                try:
                    async with aclosing(self._router.stream(request, whole=whole)) as messages:
                        async for message in messages:
                            begun = True
                            yield message
                    return
                except Overloaded:
                    if begun or (self._inside == 1 and not ended.is_set()):
                        raise
                    refused = True
                finally:
                    self._inside -= 1
                    if not refused:  # also where the reader has had enough
                        self._ended.set()
                        self._ended = asyncio.Event()
                await ended.wait()
