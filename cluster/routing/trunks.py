"""The ingress's ends of the trunks: one for each replica with several streams (see replicas/trunk.py)."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ...replicas.errors import MotleyError, Unavailable
from ...replicas.mailbox import MOST_MERGED, merge
from ...replicas.protocol import StreamMessage
from ...replicas.trunk import unpack
from .leave import leave
from .placement import Placement
from .pulse import Attempt

log = logging.getLogger(__name__)

FAILURES = (MotleyError, RayError, RayServeException, grpc.RpcError)
Item = StreamMessage | str | int  # of a request's own stream
PAYS_FROM = 2  # streams on one replica


class Line:
    """One attempt of one request: its messages in order, of its own stream first and then by the trunk.

    A reader that is slower than the engine gets what has piled up merged, unless `apart`: then every step's
    message stays one, which is of use only in measuring.
    """

    def __init__(self, placement: Placement, open_trunks: Container[str], *, apart: bool = False) -> None:
        self.placement = placement
        self._open_trunks = open_trunks
        self._apart = apart
        self._ready: deque[StreamMessage] = deque()
        self._trunk: str | None = None  # set when all of its own stream has been read
        self._by_trunk = self._announced = 0  # messages; the latter when its own stream has said how many
        self._over = False
        self._error: Exception | None = None
        self._follower: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self, own: AsyncIterator[Item]) -> StreamMessage | None:
        """The next message, or None at the end. `own`: the rest of the attempt's own stream. Raises its error."""
        while self._trunk is None:
            item = await anext(own, None)  # only as fast as its reader: whoever writes it waits
            if not isinstance(item, str):
                assert not isinstance(item, int), "how many went by the trunk, and none did"
                return item
            self._switch(item, own)
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._over and self._by_trunk >= self._announced:
                return None
            if self._over and self._trunk not in self._open_trunks:
                raise Unavailable("the trunk broke", code="replica_lost")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if len(self._ready) == 1 or self._apart:
            return self._ready.popleft()
        return merge([self._ready.popleft() for _ in range(min(len(self._ready), MOST_MERGED))])

    def from_trunk(self, message: StreamMessage) -> None:
        """May come before its turn, which `next` sees to."""
        self._by_trunk += 1
        self._ready.append(message)
        self.wake()

    def wake(self) -> None:
        """Look again whether there is something to read or to wait for."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()

    def _switch(self, trunk: str, own: AsyncIterator[Item]) -> None:
        self._trunk = trunk
        self._follower = asyncio.create_task(self._follow(own))

    async def _follow(self, own: AsyncIterator[Item]) -> None:
        try:
            async for item in own:
                assert isinstance(item, int), "all messages go by the trunk now"
                self._announced = item
        except FAILURES as error:
            self._error = error
        self._over = True
        self.wake()


class Trunks:
    """Opened when they pay, read to their end. `read`: the pool's method that is a replica's trunk.

    apart    no line merges messages
    on_life  told the name of a replica whose trunk has brought something
    """

    def __init__(self, read: Any, place: Callable[[str], Placement], on_life: Callable[[str], None]) -> None:
        self.apart = False
        self._read = read
        self._place = place
        self._on_life = on_life
        self._ingress = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._lines: dict[int, Line] = {}
        self._streams: Counter[str] = Counter()  # by replica
        self._open: set[str] = set()  # trunks
        self._followed: dict[str, asyncio.Task[None]] = {}  # by replica

    @contextmanager
    def line(self, placement: Placement) -> Iterator[Line]:
        """For one attempt that goes where `placement` says."""
        number = next(self._numbers)
        placement.ticket = (self._ingress, number)
        line = self._lines[number] = Line(placement, self._open, apart=self.apart)
        try:
            yield line
        finally:
            del self._lines[number]
            line.close()

    @contextmanager
    def streaming(self, line: Line) -> Iterator[None]:
        """While an attempt has more to come than its first message."""
        replica = line.placement.replica or ""
        self._streams[replica] += 1
        if self._streams[replica] >= PAYS_FROM and replica not in self._followed:
            # Without the context of the request that happens to be there: Serve would take it for that one's.
            task = asyncio.create_task(self._follow(replica), context=contextvars.Context())
            self._followed[replica] = task
        try:
            yield
        finally:
            self._streams[replica] -= 1
            if not self._streams[replica]:
                del self._streams[replica]

    async def _follow(self, replica: str) -> None:
        name = secrets.token_hex(8)
        attempt = Attempt(self._place(replica))
        response = self._read.remote(self._ingress, name, attempt.placement)
        self._open.add(name)
        try:
            batches = aiter(response)
            while (item := await attempt.wait(anext(batches, None))) is not None:
                self._on_life(replica)
                load, batch = item
                for number, packed in batch:
                    if (line := self._lines.get(number)) is not None:
                        line.from_trunk(unpack(packed, load))
        except FAILURES as error:
            log.info("the trunk of replica %s broke: %s", replica, error)
        finally:
            leave(response)
            self._open.remove(name)
            del self._followed[replica]
            for line in self._lines.values():
                line.wake()
