"""The ingress's ends of the trunks: one for each replica with several streams (see replicas/trunk.py)."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ...replicas.errors import MotleyError, Unavailable
from ...replicas.pile import MOST_MERGED, Pile
from ...replicas.protocol import StreamMessage
from ...replicas.trunk import unpack
from .leave import leave
from .placement import Placement
from .pulse import Attempt

log = logging.getLogger(__name__)

FAILURES = (MotleyError, RayError, RayServeException, grpc.RpcError)
Item = StreamMessage | str | int  # of a request's own stream
PAYS_FROM = 2  # streams on one replica
MOST_BYTES = 2**20  # that came by a trunk and wait for one reader; then the rest comes by the request's own stream


class Line:
    """One attempt of one request: its messages in order, of its own stream first and then by the trunk.

    A trunk waits for none of its readers. So one that is behind is set aside: what follows what the trunk has brought
    comes by the request's own stream again, only as fast as it is read. Such a reader gets what has piled up merged,
    unless `apart`: then every step's message stays one, which is of use only in measuring.
    """

    def __init__(self, placement: Placement, open_trunks: Container[str], *, apart: bool = False) -> None:
        self.placement = placement
        self._open_trunks = open_trunks
        self._apart = apart
        self._ready = Pile()
        self._set_aside = False
        self._trunk: str | None = None  # what comes next comes by it
        self._by_trunk = 0  # messages
        self._announced: int | None = None  # how many there are in all, once its own stream has said so
        self._error: Exception | None = None
        self._follower: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self, own: AsyncIterator[Item]) -> StreamMessage | None:
        """The next message, or None at the end. `own`: the rest of the attempt's own stream. Raises its error."""
        if self._trunk is not None and not await self._more_by_trunk():
            self._trunk = None
        if self._trunk is None:
            item = await anext(own, None)  # only as fast as its reader: whoever writes it waits
            if not isinstance(item, str):
                assert not isinstance(item, int), "how many went by the trunk, and none did"
                return item
            self._switch(item, own)
            return await self.next(own)
        return self._ready.take(1 if self._apart else MOST_MERGED)

    def from_trunk(self, message: StreamMessage) -> None:
        """May come before its turn, which `next` sees to."""
        self._by_trunk += 1
        self._ready.put(message)
        self.wake()

    def falls_behind(self) -> bool:
        """True once, when too much waits for its reader."""
        if self._set_aside or self._ready.num_bytes <= MOST_BYTES:
            return False
        self._set_aside = True
        return True

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

    async def _more_by_trunk(self) -> bool:
        """There is something to take, or nothing follows by the trunk."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._announced is not None and self._by_trunk >= self._announced:
                return False
            if self._announced is not None and self._trunk not in self._open_trunks:
                raise Unavailable("the trunk broke", code="replica_lost")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return True

    async def _follow(self, own: AsyncIterator[Item]) -> None:
        try:
            item = await anext(own, 0)
            assert isinstance(item, int), "messages go by the trunk now"
            self._announced = item
        except FAILURES as error:
            self._error = error
        self.wake()


class Trunks:
    """Opened when they pay, read to their end. `read`, `aside`: the pool's methods `trunk` and `aside`.

    apart    no line merges messages
    on_life  told the name of a replica whose trunk has brought something
    """

    def __init__(
        self, read: Any, aside: Any, place: Callable[[str], Placement], on_life: Callable[[str], None]
    ) -> None:
        self.apart = False
        self._read = read
        self._aside = aside
        self._telling: set[asyncio.Task[None]] = set()
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
                        if line.falls_behind():
                            self._tell(replica, number)
        except FAILURES as error:
            log.info("the trunk of replica %s broke: %s", replica, error)
        finally:
            leave(response)
            self._open.remove(name)
            del self._followed[replica]
            for line in self._lines.values():
                line.wake()

    def _tell(self, replica: str, number: int) -> None:
        """That line's reader is behind. Should the replica not hear of it, it brings all of it by the trunk."""
        task = asyncio.create_task(self._set_aside(replica, number), context=contextvars.Context())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _set_aside(self, replica: str, number: int) -> None:
        attempt = Attempt(self._place(replica))
        response = self._aside.remote((self._ingress, number), attempt.placement)
        try:
            with suppress(*FAILURES):  # then it is the replica that has gone, and all its streams with it
                await attempt.wait(response)
        finally:
            leave(response)
