"""Prompts of one call: a few are computed at once and others follow as these end, or they could fill a queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from ....replicas.errors import DeadlineExceeded, Overloaded
from ....replicas.types import Request, StreamMessage

MAX_PROMPTS_AT_ONCE = 32  # prompts of one call: the rest of the room is for others


class RequestStreamer(Protocol):
    def stream(self, request: Request, *, whole: bool = False) -> AsyncGenerator[StreamMessage, None]: ...


class ConcurrentPrompts:
    """The router's `stream` for the requests of one call.

    A request that is refused because queues are full waits until another of this call has ended, and retries. If no
    other is left, other clients fill the queue, and Overloaded is raised as for a call of one prompt. The time that a
    request waits counts against its deadline.
    """

    def __init__(self, router: RequestStreamer) -> None:
        self._router = router
        self._slots = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)
        self._inside = 0  # under way, or being tried
        self._ended = asyncio.Event()  # the next one

    async def stream(self, request: Request, *, whole: bool = False) -> AsyncGenerator[StreamMessage, None]:
        clock = asyncio.get_running_loop().time
        ends = None if request.deadline_s is None else clock() + request.deadline_s
        await _by(ends, self._slots.acquire())
        try:
            while True:
                ended, begun, refused = self._ended, False, False
                left = request if ends is None else replace(request, deadline_s=_left(ends - clock()))
                self._inside += 1
                try:
                    async with aclosing(self._router.stream(left, whole=whole)) as messages:
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
                await _by(ends, ended.wait())
        finally:
            self._slots.release()


async def _by(ends: float | None, awaited: Awaitable[object]) -> None:
    """Wait until a time by the loop's clock. Raises DeadlineExceeded then."""
    try:
        async with asyncio.timeout_at(ends):
            await awaited
    except TimeoutError:
        _left(0.0)


def _left(seconds: float) -> float:
    if seconds <= 0:
        raise DeadlineExceeded("the deadline passed before the request began")
    return seconds
