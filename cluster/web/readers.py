"""Clients that do not read what they asked for, or hardly.

A write to such a client waits, with it the replica's stream, and with that memory. How much lies on the way is
bounded in bytes (replicas/mailbox.py, routing/trunks.py): then the engine waits, and takes its place and its KV
for others meanwhile. How long it may lie there is bounded here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from ...replicas.errors import ReaderStalled
from .. import access_log

log = logging.getLogger(__name__)

T = TypeVar("T")

READER_TIMEOUT_S = 30.0
LEAST_BYTES_S = 1024  # of a reader that is behind, on the average: a modem of 1995 takes more
_BEHIND = 0.9  # of its patience, below which what a reader takes is counted: that costs as much as writing it


class Reader:
    """Whoever reads one answer, and how long it is waited for.

    That is `timeout_s`. A write that waits uses it up; a second comes back for every LEAST_BYTES_S bytes that are
    taken, and for every second in which there is nothing to write. So one that reads nothing is given up after
    `timeout_s`, one that drips later, and one that keeps up never, however late the event loop is to see that a write
    is done. `clock` is in seconds.

    stalled  it has been given up
    """

    __slots__ = ("_clock", "_give_up", "_late_s", "_left_s", "_since", "_timeout_s", "_writing", "call", "stalled")

    def __init__(self, give_up: Callable[[], object], timeout_s: float, clock: Callable[[], float]) -> None:
        self.call = access_log.current().id
        self.stalled = False
        self._give_up = give_up
        self._timeout_s = self._left_s = timeout_s
        self._clock = clock
        self._since = clock()  # when the write began, or the wait for something to write
        self._writing = False
        self._late_s = 0.0  # the event loop, of late

    def writing(self) -> None:
        now = self._clock()
        self._earn(now - self._since)
        self._since, self._writing = now, True

    def written(self, num_bytes: Callable[[], int]) -> None:
        """The write is done with; of so many bytes."""
        now = self._clock()
        self._left_s -= max(0.0, now - self._since - self._late_s)
        if self._left_s < _BEHIND * self._timeout_s:
            self._earn(num_bytes() / LEAST_BYTES_S)
        self._since, self._writing = now, False

    @property
    def too_slow(self) -> bool:
        return self._writing and self._clock() - self._since > self._left_s

    def excuse(self, late_s: float) -> None:
        """The event loop came so much too late to see what was taken: no fault of the reader's."""
        self._late_s = late_s
        self._earn(late_s)  # of a write before this, whose end was seen late
        if self._writing:
            self._since = min(self._clock(), self._since + late_s)

    def give_up(self) -> None:
        self.stalled = True
        log.warning("call %s: its client has taken too little of the answer, and is left", self.call)
        self._give_up()

    def _earn(self, seconds: float) -> None:
        self._left_s = min(self._timeout_s, self._left_s + seconds)


class Readers:
    """Those of one ingress. Looks them over now and then: a timer for each write would cost more than the write.

    clock  in seconds; None: the event loop's
    """

    def __init__(self, timeout_s: float = READER_TIMEOUT_S, clock: Callable[[], float] | None = None) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._readers: set[Reader] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._readers)

    @contextmanager
    def reader(self, give_up: Callable[[], object]) -> Iterator[Reader]:
        """For one answer. `give_up` is called once if it is not taken in time."""
        reader = Reader(give_up, self._timeout_s, self._clock or asyncio.get_running_loop().time)
        self._readers.add(reader)
        if self._timer is None:
            self._arm()
        try:
            yield reader
        finally:
            self._readers.remove(reader)

    async def watched(self, items: AsyncGenerator[T, None], num_bytes: Callable[[T], int]) -> AsyncGenerator[T, None]:
        """The same items, closed at the end, or when they are not taken in time.

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
                    reader.written(partial(num_bytes, item))
                    if reader.stalled:
                        message = f"nothing was read for {self._timeout_s:g} s, or little for longer"
                        raise ReaderStalled(message, code="reader_stalled")
        finally:
            await (closing[0] if closing else items.aclose())

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self._timeout_s / 10
        self._timer = loop.call_at(due, self._look, due)

    def _look(self, due: float) -> None:
        self._timer = None
        late_s = asyncio.get_running_loop().time() - due
        for reader in self._readers:
            reader.excuse(late_s)
            if reader.too_slow and not reader.stalled:
                reader.give_up()
        if self._readers:
            self._arm()
