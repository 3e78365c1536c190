"""Bounds on requests whose bodies have not fully arrived: how many there may be, and how many bytes they may hold.

Each may take its time, and many at once would take memory and capacity from others. A body that has fully arrived is no
longer counted here: from then on the engine's admission decides.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import TypeVar

from ...replicas.errors import Overloaded

MAX_MESSAGE_BYTES = 8 * 2**20  # a body or gRPC message from a client: a million token ids
MAX_BYTES = 512 * 2**20
MAX_BODIES = 2048  # bodies that have taken longer than LATE_S
TENANT_SHARE = 0.5  # share of each bound for one tenant
LATE_S = 1.0

T = TypeVar("T")


class IncomingBodies:
    """Limiter of the bodies of one ingress that have not fully arrived: beyond a bound on their bytes or on late ones,
    in all or for one tenant, Overloaded is raised.

    num_bytes   bytes that these bodies hold
    num_bodies  number of them that are late, by LATE_S
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_bodies: int = MAX_BODIES) -> None:
        self._max = {"bytes": max_bytes, "bodies": max_bodies}
        self._held: Counter[str] = Counter()
        self._by_tenant: Counter[tuple[str, str]] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._held["bytes"]

    @property
    def num_bodies(self) -> int:
        return self._held["bodies"]

    def begin(self, tenant: str) -> IncomingBody:
        return IncomingBody(self, tenant)

    def take(self, tenant: str, what: str, number: int) -> None:
        """Count `number` more bytes or bodies. Raises Overloaded if these are too many in all, or for one tenant."""
        limit = self._max[what]
        if self._held[what] + number > limit or self._by_tenant[tenant, what] + number > limit * TENANT_SHARE:
            message = "too many requests are being sent and are not whole; send them at once, or try again shortly"
            raise Overloaded(message, code="bodies_full")
        self._held[what] += number
        self._by_tenant[tenant, what] += number

    def give_back(self, tenant: str, what: str, number: int) -> None:
        self._held[what] -= number
        self._by_tenant[tenant, what] -= number
        if not self._by_tenant[tenant, what]:
            del self._by_tenant[tenant, what]


class IncomingBody:
    """A body that has not fully arrived. Counts nothing after `end`, which may be called again."""

    __slots__ = ("_arriving", "_due", "_held", "_tenant")

    def __init__(self, arriving: IncomingBodies, tenant: str) -> None:
        self._arriving = arriving
        self._tenant = tenant
        self._held: Counter[str] = Counter()
        self._due = asyncio.get_running_loop().time() + LATE_S

    def hold(self, what: str, number: int) -> None:
        """Count `number` more bytes or bodies. Raises Overloaded if these are too many."""
        self._arriving.take(self._tenant, what, number)
        self._held[what] += number

    def end(self) -> None:
        for what, number in self._held.items():
            self._arriving.give_back(self._tenant, what, number)
        self._held.clear()

    async def next(self, part: Awaitable[T], deadline: float, late_bytes: int = 0) -> T:
        """Return what `part` returns. Raises TimeoutError at the deadline, by the event loop's clock.

        A body that becomes late counts as one, and with it the `late_bytes` that are taken to be on their way; raises
        Overloaded if these are too many.
        """
        refused: list[Overloaded] = []
        limit = asyncio.timeout_at(deadline)

        def late() -> None:
            try:
                self.hold("bodies", 1)
                self.hold("bytes", late_bytes)
            except Overloaded as error:
                refused.append(error)
                limit.reschedule(self._due)

        timer = None if self._held["bodies"] else asyncio.get_running_loop().call_at(self._due, late)
        try:
            async with limit:
                return await part
        except TimeoutError:
            if refused:
                raise refused[0] from None
            raise
        finally:
            if timer is not None:
                timer.cancel()


INCOMING_BODIES = IncomingBodies()  # the bodies of this process
