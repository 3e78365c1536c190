"""Admission queue: requests that no replica would take now wait for their turn, within bounds."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ....replicas.errors import DeadlineExceeded, MotleyError, Overloaded, Unavailable
from ....replicas.types import Request
from ..directory.replica_directory import ReplicaDirectory
from ..policy.routing_policies import DEFAULT_POLICY
from ..prediction.context_lengths import max_context_tokens
from ..prediction.latency_model import Slo
from .fair_queue import FairQueue, FairQueueEntry
from .inflight_priorities import InflightPriorities

__all__ = ["RequestQueue", "RoutingConfig"]

POLL_INTERVAL_S = 0.05  # interval of the search for requests that have waited too long, if nothing else happens
STARVED_S = 0.25  # after this wait, a request that other ingresses crowd out is sent although no free capacity is seen
MAX_SCANNED = 64  # waiting requests, next first, of which one may be sent before those ahead of it
MAX_PREDICTED = 8  # those of them for which a prediction is made
SCAN_INTERVAL_S = 0.01  # minimum time between two scans of requests behind one that cannot go
MAX_PASSED_SHARE = 0.5  # share of the time in which a request can still meet its objective, while others may pass it
REFUSAL_PAUSE_S = 0.1  # pause after a fleet refused a request for which it should have had capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Settings of how an ingress places requests.

    slo                 latency objectives; None: the sooner the better
    shed                refuse requests that are predicted to miss the objectives, rather than serve them late
    weights             weights of tenants whose share is not 1 while not all can be served
    groups              cache group of tenants that share prefixes with others, by tenant
    max_wait_s          longest wait while every replica is full; 0: requests are refused at once
    hold_s              longest wait while there is no replica at all
    max_waiting         maximum number of waiting requests
    max_waiting_tokens  maximum number of prompt tokens of waiting requests
    policy              name of the routing policy
    """

    slo: Slo | None = None
    shed: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    max_wait_s: float = 0.0
    hold_s: float = 30.0
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    policy: str = DEFAULT_POLICY


@dataclass(slots=True, eq=False)
class _QueuedRequest:
    """One waiting request.

    admitted       resolved when the request may be sent
    waiting_since  when it began to wait for capacity; infinite: there is no replica for it
    max_tokens     tokens that it may come to
    min_ttft_s     lower bound of its time to first token (see `ReplicaDirectory.min_ttft_s`)
    fleet          version of the set of replicas that `min_ttft_s` was computed for
    """

    request: Request
    admitted: asyncio.Future[None]
    arrived: float
    deadline: float
    waiting_since: float
    max_tokens: float
    min_ttft_s: float = 0.0
    fleet: int = -1

    def needs_no_more_than(self, other: _QueuedRequest) -> bool:
        """Return whether any replica with capacity for the other request also has capacity for this one."""
        tokens, of_other = len(self.request.prompt_ids), len(other.request.prompt_ids)
        return tokens <= of_other and self.max_tokens <= other.max_tokens and self.waiting_since >= other.waiting_since


class RequestQueue:
    """Admission queue of one ingress. Times are in seconds of the event loop's clock.

    live     directory of the replicas
    routing  settings of the queue
    several  returns whether there is more than one pool
    """

    def __init__(self, live: ReplicaDirectory, routing: RoutingConfig, several: Callable[[], bool]) -> None:
        self._live = live
        self._routing = routing
        self._several = several
        self.priorities = InflightPriorities()  # counts requests that were sent, until their callers end them
        self._queue: FairQueue[_QueuedRequest] = FairQueue(
            routing.weights, routing.max_waiting, routing.max_waiting_tokens
        )
        self._pump: asyncio.Task[None] | None = None
        self._closed_until = 0.0
        self._next_scan_at = 0.0

    @property
    def held(self) -> int:
        return len(self._queue)

    @property
    def holds(self) -> bool:
        """Whether requests wait while there is no replica yet."""
        return self._routing.hold_s > 0

    @property
    def queues(self) -> bool:
        """Whether requests wait while all replicas are full."""
        return self._routing.max_wait_s > 0

    async def wait_turn(self, request: Request, arrived: float, deadline: float, *, is_retry: bool = False) -> None:
        """Wait until the request may be sent.

        Raises Overloaded if the queue is full or it has waited too long, DeadlineExceeded, and Unavailable if no
        replica came.

        is_retry  the request was sent before, and every replica refused it
        """
        now = _now()
        if is_retry:
            self._closed_until = now + REFUSAL_PAUSE_S
        elif not len(self._queue) and self._may_go(request, now, now - arrived):
            return
        admitted = asyncio.get_running_loop().create_future()
        absent = self._is_absent(request)  # now: a replica may come before the queue looks at it
        waiting_since = math.inf if absent else arrived
        queued = _QueuedRequest(request, admitted, arrived, deadline, waiting_since, max_context_tokens(request))
        if self._sheds and not absent and self._cannot_meet_slo(queued, now):
            raise _objective_error()
        entry, evicted = self._queue.push(
            queued, request.tenant, len(request.prompt_ids), priority=request.priority, is_retry=is_retry
        )
        for each in evicted:
            _refuse(each.item, self._full())
        if entry is None:
            raise self._full()
        if self._pump is None:
            # In an empty context: that of the first request would live on in the task.
            self._pump = asyncio.create_task(self._run(), context=contextvars.Context())
        self._live.changed.set()
        try:
            await queued.admitted
        finally:
            self._queue.remove(entry)

    def replace(self, routing: RoutingConfig) -> None:
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
                    if (error := self._wait_error(entry.item, now)) is not None:
                        self._end(entry, error)
                while (chosen := self._next(_now())) is not None:
                    self._queue.take(chosen)
                    chosen.item.admitted.set_result(None)
                    await asyncio.sleep(0)  # let it be placed and counted on its replica before the next is considered
                try:
                    async with asyncio.timeout(POLL_INTERVAL_S):
                        await self._live.changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._pump = None

    def _next(self, now: float) -> FairQueueEntry[_QueuedRequest] | None:
        """Return the first request in turn that may be sent now.

        Refuse those that can no longer meet their objectives.
        """
        refused: list[_QueuedRequest] = []
        unmeetable: list[FairQueueEntry[_QueuedRequest]] = []
        chosen = None
        for entry in islice(self._queue.in_turn(), MAX_SCANNED):
            queued = entry.item
            # Its client has just cancelled, or it has no replica.
            if queued.admitted.done() or math.isinf(queued.waiting_since):
                continue
            if not any(each.needs_no_more_than(queued) for each in refused):
                if refused and (now < self._next_scan_at or len(refused) == MAX_PREDICTED):
                    break
                if self._is_next(queued, now):
                    chosen = entry
                    break
                if self._is_unmeetable(queued, now):
                    unmeetable.append(entry)
                    continue
                refused.append(queued)
            if not self._may_be_passed(queued, now):
                break
        if chosen is None and now >= self._next_scan_at:
            self._next_scan_at = now + SCAN_INTERVAL_S
        for entry in unmeetable:
            self._end(entry, _objective_error())
        return chosen

    def _is_next(self, queued: _QueuedRequest, now: float) -> bool:
        if self._may_go(queued.request, now, now - queued.waiting_since):
            return True
        may_bypass = self._live.replicas and not self._routing.shed and now >= self._closed_until
        return bool(may_bypass and now - queued.arrived > STARVED_S and self._live.is_starved_by_others(queued.request))

    def _may_be_passed(self, queued: _QueuedRequest, now: float) -> bool:
        """Return whether others with capacity may go before this request, which is so only for a limited time."""
        slo = self._routing.slo
        return (
            self._sheds
            and slo is not None
            and now - queued.waiting_since < MAX_PASSED_SHARE * (slo.ttft_s - queued.min_ttft_s)
        )

    def _may_go(self, request: Request, now: float, waited_s: float) -> bool:
        live = self._live
        if self._is_absent(request):
            return False
        if not self.queues or not live.replicas:
            return True
        allow_late = not self._sheds
        return now >= self._closed_until and (
            live.has_capacity(request, allow_late=allow_late, waited_s=0.0 if allow_late else waited_s)
            or self._would_displace(request)
        )

    def _would_displace(self, request: Request) -> bool:
        """Return whether a replica would preempt a request of lower priority, sent by this ingress, for this one.

        No more such requests are sent than there are places, since others of the same or higher priority take the
        remaining.
        """
        lowest, priority = self.priorities.lowest, request.priority
        if lowest is None or lowest >= priority:
            return False
        places = sum(entry.profile.max_running for entry in self._live.replicas.values())
        return self.priorities.count_at_least(priority) < places

    def _is_absent(self, request: Request) -> bool:
        """Return whether there is no replica for the request.

        With a single pool, Serve itself waits for the first replica.
        """
        live = self._live
        return not live.fits(request) if live.replicas else live.had_replica or self._several()

    def _wait_error(self, queued: _QueuedRequest, now: float) -> MotleyError | None:
        """Return the error that ends the request's wait, or None if it goes on waiting."""
        routing = self._routing
        if now >= queued.deadline:
            return DeadlineExceeded("the deadline passed before any replica had room")
        if self._is_absent(queued.request):
            queued.waiting_since = math.inf
            if now - queued.arrived > routing.hold_s:
                return Unavailable("there is no replica, and none has come; try again shortly", code="no_replica")
            return None
        if math.isinf(queued.waiting_since):
            queued.waiting_since = now
        if self._sheds and self._misses_slo_when_idle(queued, now):
            return _objective_error()
        return self._full() if now - queued.waiting_since > routing.max_wait_s else None

    @property
    def _sheds(self) -> bool:
        return self._routing.shed and self._routing.slo is not None and self.queues

    def _cannot_meet_slo(self, queued: _QueuedRequest, now: float) -> bool:
        """Return whether waiting is useless from the start.

        Capacity that other waiting requests take is considered later.
        """
        return self._misses_slo_when_idle(queued, now) or (not len(self._queue) and self._is_unmeetable(queued, now))

    def _misses_slo_when_idle(self, queued: _QueuedRequest, now: float) -> bool:
        """Return whether no replica would answer the request in time even if it were idle."""
        assert self._routing.slo is not None
        left_s, fleet = self._routing.slo.ttft_s - (now - queued.waiting_since), self._live.contexts.version
        if queued.fleet != fleet or queued.min_ttft_s > left_s:  # replicas may have proved to be faster since
            queued.min_ttft_s, queued.fleet = self._live.min_ttft_s(queued.request), fleet
        return queued.min_ttft_s > left_s

    def _is_unmeetable(self, queued: _QueuedRequest, now: float) -> bool:
        """Return whether the replicas that could answer in time are idle and still would not.

        False while there are none.
        """
        if not self._sheds or now < self._closed_until or self._is_absent(queued.request):
            return False
        return self._live.is_unmeetable(queued.request, now - queued.waiting_since)

    def _full(self) -> Overloaded:
        return Overloaded(
            f"every replica is full, and {len(self._queue)} requests with {self._queue.tokens} prompt tokens wait",
            code="queue_full",
            retry_after_s=1,
        )

    def _end(self, entry: FairQueueEntry[_QueuedRequest], error: MotleyError) -> None:
        self._queue.remove(entry)
        _refuse(entry.item, error)


def _refuse(queued: _QueuedRequest, error: MotleyError) -> None:
    if not queued.admitted.done():
        queued.admitted.set_exception(error)


def _objective_error() -> Overloaded:
    return Overloaded("no replica is predicted to answer in time", code="queue_full", retry_after_s=1)


def _now() -> float:
    return asyncio.get_running_loop().time()
