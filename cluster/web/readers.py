"""Clients that do not read what they asked for.

A write to such a client waits, with it the replica's stream, and with that KV, memory and a place. How much lies
on the way is bounded by the buffers of the connections between; how long it may lie there is bounded here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ...replicas.errors import ReaderStalled

T = TypeVar("T")

READER_TIMEOUT_S = 30.0


class Reader:
    """Whoever reads one answer.

    waited_since  when the write began that still waits, in the loop's seconds; None: none does
    stalled       it has been given up
    """

    __slots__ = ("_give_up", "_loop", "stalled", "waited_since")

    def __init__(self, give_up: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self._give_up = give_up
        self._loop = loop
        self.waited_since: float | None = None
        self.stalled = False

    def writing(self) -> None:
        self.waited_since = self._loop.time()

    def written(self) -> None:
        self.waited_since = None

    def give_up(self) -> None:
        self.stalled = True
        self._give_up()


class Readers:
    """Those of one ingress. Looks them over now and then: a timer for each write would cost more than the write."""

    def __init__(self, timeout_s: float = READER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._readers: set[Reader] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._readers)

    @contextmanager
    def reader(self, give_up: Callable[[], object]) -> Iterator[Reader]:
        """For one answer. `give_up` is called once if a write waits for `timeout_s`."""
        reader = Reader(give_up, asyncio.get_running_loop())
        self._readers.add(reader)
        if self._timer is None:
            self._arm()
        try:
            yield reader
        finally:
            self._readers.remove(reader)

    async def watched(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """The same items, closed at the end, or when one is not done with for `timeout_s`.

        Raises ReaderStalled to whoever comes back after that. For writers who must not be cancelled: gRPC would
        then never tell the client how the call ended.
        """
        closing: list[asyncio.Task[None]] = []

        def close() -> None:
            closing.append(asyncio.create_task(items.aclose()))

        try:
            with self.reader(close) as reader:
                async for item in items:
                    reader.writing()
                    yield item
                    reader.written()
                    if reader.stalled:
                        raise ReaderStalled(f"nothing was read for {self._timeout_s:g} s", code="reader_stalled")
        finally:
            await (closing[0] if closing else items.aclose())

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s / 10, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for reader in self._readers:
            since = reader.waited_since
            if since is not None and now - since > self._timeout_s and not reader.stalled:
                reader.give_up()
        if self._readers:
            self._arm()
