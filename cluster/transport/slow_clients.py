"""Watch over clients that do not read their answer, or read it too slowly.

A write to such a client waits, with it the replica's stream, and with that memory. How much may wait is bounded in
bytes (replicas/engine/streams/output_queue.py, cluster/routing/streaming/stream_demultiplexer.py): then the engine
pauses the sequence, and gives its place and its KV to others meanwhile. How long it may wait is bounded here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from ...replicas.errors import ReaderStalled
from . import access_log

log = logging.getLogger(__name__)

T = TypeVar("T")

READER_TIMEOUT_S = 30.0
MIN_BYTES_PER_S = 1024  # bytes/s, on average, from a slow reader: a modem of 1995 takes more
_BEHIND = 0.9  # share of the budget below which read bytes are counted: that costs as much as writing


class ClientReader:
    """Client that reads one answer, and how much longer a write may wait for it.

    That budget is `timeout_s`. A waiting write uses it up; one second of it comes back for every MIN_BYTES_PER_S bytes
    that are read, and for every second in which there is nothing to write. So a client that reads nothing is
    disconnected after `timeout_s`, one that reads very slowly later, and one that keeps up never, however late the
    event loop notices that a write is done. `clock` is in seconds.

    stalled  whether it has been given up
    """

    __slots__ = ("_began", "_clock", "_give_up", "_late_s", "_left_s", "_timeout_s", "_writing", "call", "stalled")

    def __init__(self, give_up: Callable[[], object], timeout_s: float, clock: Callable[[], float]) -> None:
        self.call = access_log.current_record().id
        self.stalled = False
        self._give_up = give_up
        self._timeout_s = self._left_s = timeout_s
        self._clock = clock
        self._began = clock()  # when the write, or the wait for data to write, began
        self._writing = False
        self._late_s = 0.0  # seconds by which the event loop was late at the last check

    def writing(self) -> None:
        now = self._clock()
        self._earn(now - self._began)
        self._began, self._writing = now, True

    def written(self, num_bytes: Callable[[], int]) -> None:
        """Note that the write is done, and how many bytes it had."""
        now = self._clock()
        self._left_s -= max(0.0, now - self._began - self._late_s)
        if self._left_s < _BEHIND * self._timeout_s:
            self._earn(num_bytes() / MIN_BYTES_PER_S)
        self._began, self._writing = now, False

    @property
    def too_slow(self) -> bool:
        return self._writing and self._clock() - self._began > self._left_s

    def excuse(self, late_s: float) -> None:
        """Give back the time by which the event loop noticed reads too late, which is not the client's fault."""
        self._late_s = late_s
        self._earn(late_s)  # for an earlier write, whose end was noticed late
        if self._writing:
            self._began = min(self._clock(), self._began + late_s)

    def give_up(self) -> None:
        self.stalled = True
        log.warning("call %s: the client read too little of the answer and is disconnected", self.call)
        self._give_up()

    def _earn(self, seconds: float) -> None:
        self._left_s = min(self._timeout_s, self._left_s + seconds)


class SlowClientMonitor:
    """Clients of one ingress that read answers. They are checked periodically, since a timer for each write would cost
    more than the write.

    clock  in seconds; None: the event loop's
    """

    def __init__(self, timeout_s: float = READER_TIMEOUT_S, clock: Callable[[], float] | None = None) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._readers: set[ClientReader] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._readers)

    @contextmanager
    def reader(self, give_up: Callable[[], object]) -> Iterator[ClientReader]:
        """Watch the client of one answer. `give_up` is called once if it reads too slowly."""
        reader = ClientReader(give_up, self._timeout_s, self._clock or asyncio.get_running_loop().time)
        self._readers.add(reader)
        if self._timer is None:
            self._arm()
        try:
            yield reader
        finally:
            self._readers.remove(reader)

    async def watched(self, items: AsyncGenerator[T, None], num_bytes: Callable[[T], int]) -> AsyncGenerator[T, None]:
        """Yield the same items, and close `items` at the end or when the client reads too slowly.

        Raises ReaderStalled at the next item after that. This is for writers that must not be cancelled: gRPC would
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
        self._timer = loop.call_at(due, self._check, due)

    def _check(self, due: float) -> None:
        self._timer = None
        late_s = asyncio.get_running_loop().time() - due
        for reader in self._readers:
            reader.excuse(late_s)
            if reader.too_slow and not reader.stalled:
                reader.give_up()
        if self._readers:
            self._arm()
