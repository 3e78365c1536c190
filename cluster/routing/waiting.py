"""Requests that no replica would take now: they wait for their turn, within bounds, rather than be refused at once."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...replicas.errors import DeadlineExceeded, MotleyError, Overloaded, Unavailable
from ...replicas.protocol import Request
from .fair_queue import Entry, FairQueue
from .live import Live, Order
from .predict import Slo

__all__ = ["Routing", "Waiting"]

LOOK_S = 0.05  # between two looks at who has waited too long, if nothing else happens
KNOCK_S = 0.25  # that one has waited by then, room that is left at once would have been heard of
AFTER_REFUSAL_S = 0.1  # a fleet that has refused what it should have had room for is left alone for so long


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How an ingress places requests.

    slo           times a request is to have; None: the sooner the better
    shed          refuse what is predicted to miss them, rather than serve it late
    weights       of tenants that have another share than 1 while not all can be served
    groups        of tenants that share prefixes with others, by tenant
    max_wait_s    how long a request may wait while every replica is full; 0: it is refused at once
    hold_s        how long it may wait while there is no replica at all
    max_waiting   requests that may wait; max_waiting_tokens: tokens of their prompts
    order         another order of the replicas than best first: for benchmarks, beside which Motley's is to stand
    """

    slo: Slo | None = None
    shed: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    max_wait_s: float = 0.0
    hold_s: float = 30.0
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    order: Order | None = None


@dataclass(slots=True, eq=False)
class _Turn:
    request: Request
    came: asyncio.Future[None]
    arrived: float
    deadline: float


class Waiting:
    """One ingress's. Times in the loop's seconds. `several`: whether there is more than one pool."""

    def __init__(self, live: Live, routing: Routing, several: Callable[[], bool]) -> None:
        self._live = live
        self._routing = routing
        self._several = several
        self._queue: FairQueue[_Turn] = FairQueue(routing.weights, routing.max_waiting, routing.max_waiting_tokens)
        self._pump: asyncio.Task[None] | None = None
        self._closed_until = 0.0
        self._present_since = 0.0  # replicas

    @property
    def held(self) -> int:
        return len(self._queue)

    @property
    def queues(self) -> bool:
        """Whether requests wait for full replicas."""
        return self._routing.max_wait_s > 0

    async def turn(self, request: Request, arrived: float, deadline: float, *, again: bool = False) -> None:
        """Return when it may be sent. `again`: it was, and every replica has refused it.

        Raises Overloaded if there is no room to wait or it has waited too long, DeadlineExceeded, and Unavailable if no
        replica has come.
        """
        now = _now()
        if again:
            self._closed_until = now + AFTER_REFUSAL_S
        elif not len(self._queue) and self._may_go(request, now):
            return
        self._shed(request, now)
        turn = _Turn(request, asyncio.get_running_loop().create_future(), arrived, deadline)
        entry, left = self._queue.push(
            turn, request.tenant, len(request.prompt_ids), priority=request.priority, again=again
        )
        for each in left:
            _refuse(each.item, self._full())
        if entry is None:
            raise self._full()
        if self._pump is None:
            # Without the context of the request that happens to be first: it would live on in the task.
            self._pump = asyncio.create_task(self._run(), context=contextvars.Context())
        self._live.changed.set()
        try:
            await turn.came
        finally:
            self._queue.remove(entry)

    def replace(self, routing: Routing) -> None:
        self._routing = routing
        queue = self._queue
        queue.weights, queue.max_requests, queue.max_tokens = (
            routing.weights, routing.max_waiting, routing.max_waiting_tokens
        )  # fmt: skip

    def end_all(self, error: MotleyError) -> None:
        for entry in list(self._queue):
            self._end(entry, error)

    async def _run(self) -> None:
        try:
            while len(self._queue):
                self._live.changed.clear()
                now = _now()
                for entry in list(self._queue):
                    if (error := self._over(entry.item, now)) is not None:
                        self._end(entry, error)
                while (head := self._queue.head()) is not None and self._is_next(head.item, _now()):
                    if head.item.came.done():  # its client has left in this very turn of the loop
                        self._queue.remove(head)
                        continue
                    self._queue.pop().item.came.set_result(None)
                    await asyncio.sleep(0)  # it is placed, and counted where it went, before the next one is looked at
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._live.changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._pump = None

    def _is_next(self, turn: _Turn, now: float) -> bool:
        if self._may_go(turn.request, now):
            return True
        patient = self._live.members and not self._routing.shed and now >= self._closed_until
        return bool(patient and now - turn.arrived > KNOCK_S and self._live.is_crowded_out(turn.request))

    def _may_go(self, request: Request, now: float) -> bool:
        live = self._live
        if not live.members:
            self._present_since = math.inf
            return not self._several() and not live.had_any  # of one pool Serve knows when its first replica comes
        if math.isinf(self._present_since):
            self._present_since = now
        if not self.queues:
            return True
        return now >= self._closed_until and live.has_room(request, late=not self._routing.shed)

    def _over(self, turn: _Turn, now: float) -> MotleyError | None:
        """Why it waits no longer."""
        routing = self._routing
        if now >= turn.deadline:
            return DeadlineExceeded("the deadline passed before any replica had room")
        if not self._live.members:
            if now - turn.arrived > routing.hold_s:
                return Unavailable("there is no replica, and none has come; try again shortly", code="no_replica")
            return None
        waited_s = now - max(turn.arrived, self._present_since)
        longest_s = routing.max_wait_s
        if routing.shed and routing.slo is not None:
            longest_s = min(longest_s, routing.slo.ttft_s)
        return self._full() if waited_s > longest_s else None

    def _shed(self, request: Request, now: float) -> None:
        """Raise Overloaded for what waiting does not help."""
        if self._routing.shed and self._live.members and self.queues and now >= self._closed_until:
            alone = self._live.has_room(request, late=True) and not self._live.has_room(request, late=False)
            if alone and not len(self._queue):
                raise Overloaded("no replica is predicted to answer in time", code="queue_full", retry_after_s=1)

    def _full(self) -> Overloaded:
        return Overloaded(
            f"every replica is full, and {len(self._queue)} requests with {self._queue.tokens} prompt tokens wait",
            code="queue_full",
            retry_after_s=1,
        )

    def _end(self, entry: Entry[_Turn], error: MotleyError) -> None:
        self._queue.remove(entry)
        _refuse(entry.item, error)


def _refuse(turn: _Turn, error: MotleyError) -> None:
    if not turn.came.done():
        turn.came.set_exception(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
