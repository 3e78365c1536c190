"""Requests that no replica would take now: they wait for their turn, within bounds, rather than be refused at once."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ...replicas.errors import DeadlineExceeded, MotleyError, Overloaded, Unavailable
from ...replicas.protocol import Request
from .contexts import whole
from .fair_queue import Entry, FairQueue
from .live import Live, Order
from .predict import Slo
from .priorities import Priorities

__all__ = ["Routing", "Waiting"]

LOOK_S = 0.05  # between two looks at who has waited too long, if nothing else happens
KNOCK_S = 0.25  # that one has waited by then, room that is left at once would have been heard of
SEEN, LOOKED = 64, 8  # of those that wait, next first: how many may pass others, and of how many it is predicted
SCAN_S = 0.01  # so often
PATIENCE = 0.5  # of the time in which one can still be answered as it should: so long others may pass it
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
    """
    since    when it began to wait for room; infinite: there is no replica for it
    wanted   tokens that it may come to
    least_s  see `Live.least_s`; fleet: of which replicas
    """

    request: Request
    came: asyncio.Future[None]
    arrived: float
    deadline: float
    since: float
    wanted: float
    least_s: float = 0.0
    fleet: int = -1

    def asks_less(self, other: _Turn) -> bool:
        """Whether it has room wherever the other one has."""
        tokens, of_other = len(self.request.prompt_ids), len(other.request.prompt_ids)
        return tokens <= of_other and self.wanted <= other.wanted and self.since >= other.since


class Waiting:
    """One ingress's. Times in the loop's seconds. `several`: whether there is more than one pool."""

    def __init__(self, live: Live, routing: Routing, several: Callable[[], bool]) -> None:
        self._live = live
        self._routing = routing
        self._several = several
        self.priorities = Priorities()  # of what has had its turn, as long as its caller says so
        self._queue: FairQueue[_Turn] = FairQueue(routing.weights, routing.max_waiting, routing.max_waiting_tokens)
        self._pump: asyncio.Task[None] | None = None
        self._closed_until = 0.0
        self._scan_at = 0.0

    @property
    def held(self) -> int:
        return len(self._queue)

    @property
    def holds(self) -> bool:
        """Whether requests wait for a replica that is not there yet."""
        return self._routing.hold_s > 0

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
        elif not len(self._queue) and self._may_go(request, now, now - arrived):
            return
        came = asyncio.get_running_loop().create_future()
        turn = _Turn(request, came, arrived, deadline, arrived, whole(request))
        if self._sheds and not self._is_absent(request) and self._is_vain(turn, now):
            raise _unmet()
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
                while (chosen := self._next(_now())) is not None:
                    self._queue.take(chosen)
                    chosen.item.came.set_result(None)
                    await asyncio.sleep(0)  # it is placed, and counted where it went, before the next one is looked at
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._live.changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._pump = None

    def _next(self, now: float) -> Entry[_Turn] | None:
        """Who goes now: the first in turn that may. Those that have no hope any more leave the line."""
        refused: list[_Turn] = []
        hopeless: list[Entry[_Turn]] = []
        chosen = None
        for entry in islice(self._queue.in_turn(), SEEN):
            turn = entry.item
            if turn.came.done() or math.isinf(turn.since):  # its client has left just now, or it has no replica
                continue
            if not any(each.asks_less(turn) for each in refused):
                if refused and (now < self._scan_at or len(refused) == LOOKED):
                    break
                if self._is_next(turn, now):
                    chosen = entry
                    break
                if self._is_hopeless(turn, now):
                    hopeless.append(entry)
                    continue
                refused.append(turn)
            if not self._may_be_passed(turn, now):
                break
        if chosen is None and now >= self._scan_at:
            self._scan_at = now + SCAN_S
        for entry in hopeless:
            self._end(entry, _unmet())
        return chosen

    def _is_next(self, turn: _Turn, now: float) -> bool:
        if self._may_go(turn.request, now, now - turn.since):
            return True
        patient = self._live.members and not self._routing.shed and now >= self._closed_until
        return bool(patient and now - turn.arrived > KNOCK_S and self._live.is_crowded_out(turn.request))

    def _may_be_passed(self, turn: _Turn, now: float) -> bool:
        """By others that have room, for a time: then there is to be room for it at last."""
        slo = self._routing.slo
        return self._sheds and slo is not None and now - turn.since < PATIENCE * (slo.ttft_s - turn.least_s)

    def _may_go(self, request: Request, now: float, waited_s: float) -> bool:
        live = self._live
        if self._is_absent(request):
            return False
        if not self.queues or not live.members:
            return True
        late = not self._sheds
        return now >= self._closed_until and (
            live.has_room(request, late=late, waited_s=0.0 if late else waited_s) or self._would_displace(request)
        )

    def _would_displace(self, request: Request) -> bool:
        """Whether a replica would take another's place for it: one of a lower priority that this ingress has sent.

        No more are sent so than there are places: others of such a priority have the rest of them.
        """
        lowest, priority = self.priorities.lowest, request.priority
        if lowest is None or lowest >= priority:
            return False
        places = sum(member.profile.max_running for member in self._live.members.values())
        return self.priorities.not_below(priority) < places

    def _is_absent(self, request: Request) -> bool:
        """Whether there is no replica for it. Of one pool Serve knows when its first comes."""
        live = self._live
        return not live.fits(request) if live.members else live.had_any or self._several()

    def _over(self, turn: _Turn, now: float) -> MotleyError | None:
        """Why it waits no longer."""
        routing = self._routing
        if now >= turn.deadline:
            return DeadlineExceeded("the deadline passed before any replica had room")
        if self._is_absent(turn.request):
            turn.since = math.inf
            if now - turn.arrived > routing.hold_s:
                return Unavailable("there is no replica, and none has come; try again shortly", code="no_replica")
            return None
        if math.isinf(turn.since):
            turn.since = now
        if self._sheds and self._is_late(turn, now):
            return _unmet()
        return self._full() if now - turn.since > routing.max_wait_s else None

    @property
    def _sheds(self) -> bool:
        return self._routing.shed and self._routing.slo is not None and self.queues

    def _is_vain(self, turn: _Turn, now: float) -> bool:
        """Whether there is no use in waiting at all. What others that wait leave of the fleet is seen later."""
        return self._is_late(turn, now) or (not len(self._queue) and self._is_hopeless(turn, now))

    def _is_late(self, turn: _Turn, now: float) -> bool:
        """Whether no replica would answer it in time even if it were empty."""
        assert self._routing.slo is not None
        left_s, fleet = self._routing.slo.ttft_s - (now - turn.since), self._live.contexts.version
        if turn.fleet != fleet or turn.least_s > left_s:  # they may have been seen to be faster
            turn.least_s, turn.fleet = self._live.least_s(turn.request), fleet
        return turn.least_s > left_s

    def _is_hopeless(self, turn: _Turn, now: float) -> bool:
        """Whether those that could answer it in time are empty, and would not. Where there are none, it is held."""
        if not self._sheds or now < self._closed_until or self._is_absent(turn.request):
            return False
        return self._live.is_hopeless(turn.request, now - turn.since)

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


def _unmet() -> Overloaded:
    return Overloaded("no replica is predicted to answer in time", code="queue_full", retry_after_s=1)


def _now() -> float:
    return asyncio.get_running_loop().time()
