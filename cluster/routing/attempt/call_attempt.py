"""One call to a replica: which replica it goes to, and the wait for what comes back."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Iterable, Mapping
from typing import TypeVar

from ....replicas.errors import MotleyError, Unavailable
from ....replicas.types import CallId
from ..directory.dispatch_tracker import DispatchTracker
from ..explanation.route_record import RouteDecision
from .placement import Placement, ReplicaCandidate, SuspectReplicas

T = TypeVar("T")

OPEN_CALLS: dict[CallId, CallAttempt] = {}  # of this process, since Serve passes its routers nothing but arguments


class NoReplicaInPool(Unavailable):
    """Error for an attempt that no replica of its pool takes, while one of another pool may."""


class CallAttempt:
    """One call to one replica, whose reader can be interrupted while it waits, and only then.

    placement      where it should go
    suspects       replicas that any request has failed on
    dispatch       tracks where it goes; None: it is no request
    pool           the pool that it goes to
    deadline       end of the wait whatever the replica does, in seconds of the event loop's clock
    wait_s         longest wait for a replica to be found
    waiting_since  when its reader began to wait
    replica        the replica that it was last sent to; None while it waits for one
    found          numerics class of that replica
    candidate_ids  all replicas that existed
    tried          replicas that were offered in this round
    decision       what was known when it was placed; None: it is no request
    """

    decision: RouteDecision | None = None

    def __init__(
        self,
        call: CallId,
        placement: Placement,
        suspects: SuspectReplicas,
        dispatch: DispatchTracker | None = None,
        *,
        pool: str = "",
        deadline: float = math.inf,
        wait_s: float = math.inf,
    ) -> None:
        self.call = call
        self.placement = placement
        self.suspects = suspects
        self.dispatch = dispatch
        self.pool = pool
        self.deadline = deadline
        self.wait_s = wait_s
        self.waiting_since = 0.0
        self.replica: str | None = None
        self.found = ""
        self.candidate_ids: frozenset[str] = frozenset()
        self.tried: set[str] = set()
        self._counted = False
        self._error: MotleyError | None = None
        self._task: asyncio.Task[object] | None = None  # the reader, while it waits
        self._cancel: asyncio.Handle | None = None
        self._cancelled = False

    def choose(self, candidates: Iterable[ReplicaCandidate]) -> tuple[ReplicaCandidate | None, bool]:
        """Return the next replica to try, and whether to wait a little before trying once more.

        The replica is None if no candidate is allowed. Each candidate is tried once before any is tried again.
        """
        candidates = list(candidates)
        self.candidate_ids = frozenset(candidate.id for candidate in candidates)
        allowed = [candidate for candidate in candidates if self.placement.allows(candidate, self.suspects)]
        fresh = [candidate for candidate in allowed if candidate.id not in self.tried]
        if not allowed or (not fresh and self.placement.elsewhere):
            self._nowhere()
            return None, True
        if not fresh:
            self.tried.clear()
        # In random order, so that several ingresses do not all choose the same among equals.
        shuffled = random.sample(fresh or allowed, len(fresh or allowed))
        chosen = min(shuffled, key=lambda candidate: self.placement.rank(candidate, self.suspects))
        self._take(chosen)
        return chosen, not fresh

    def choose_best(self, candidates: Mapping[str, ReplicaCandidate]) -> ReplicaCandidate | None:
        """Return the next replica in the placement's order, or None if `choose` has to decide among all candidates."""
        for name in self.placement.order:
            chosen = candidates.get(name)
            if chosen is not None and name not in self.tried and self.placement.allows(chosen, self.suspects):
                self._take(chosen)
                return chosen
        return None

    def release(self) -> None:
        """Stop counting the request on its replica."""
        self._stop_counting()
        if self.dispatch is not None:
            self.dispatch.end()

    @property
    def waiting(self) -> bool:
        return self._task is not None and self._error is None

    async def wait(self, response: Awaitable[T]) -> T:
        """Return the response. Raises the error that `interrupt` was given, if that came first."""
        # Not asyncio.timeout: before Python 3.11.4 it fails in a task that was cancelled once and went on.
        self.waiting_since = asyncio.get_running_loop().time()
        self._task = task = _this_task()
        by_others = task.cancelling()
        if self._error is not None:  # the interrupt came at the same time as the last answer
            self._cancel_soon()
        try:
            return await response
        except asyncio.CancelledError:
            if not self._cancelled or task.cancelling() > by_others + 1 or self._error is None:
                raise
            raise self._error from None
        finally:
            self._task = None
            if self._cancel is not None:
                self._cancel.cancel()
            if self._cancelled:
                task.uncancel()
                self._cancelled = False

    def interrupt(self, error: MotleyError) -> None:
        if self.waiting:
            self._error = error
            self._cancel_soon()

    def _cancel_soon(self) -> None:
        self._cancel = asyncio.get_running_loop().call_soon(self._cancel_now)

    def _cancel_now(self) -> None:
        if self._task is not None:
            self._cancelled = True
            self._task.cancel()

    def _take(self, chosen: ReplicaCandidate) -> None:
        self.tried.add(chosen.id)
        self._stop_counting()
        self.replica, self.found = chosen.id, chosen.numerics
        if self.placement.only is None:
            self._counted = True
            self.suspects.carried[chosen.id] += self.placement.weight
        if self.dispatch is not None:
            self.dispatch.to(chosen.id)

    def _stop_counting(self) -> None:
        if self._counted and self.replica is not None:
            self.suspects.carried[self.replica] -= self.placement.weight
            if self.suspects.carried[self.replica] <= 0:
                del self.suspects.carried[self.replica]
        self._counted = False

    def _nowhere(self) -> None:
        self.release()
        self.replica = None
        if self.placement.elsewhere:
            self.interrupt(NoReplicaInPool("no replica of this pool can take the request"))
        elif self.placement.strict or self.placement.only is not None:  # waiting is of no use
            self.interrupt(Unavailable("no other replica can take the request; try again shortly", code="no_replica"))


def find_attempt(call: object) -> CallAttempt | None:
    """Return the open attempt of a call of this process; `call`: the last argument of any call.

    Classes that Serve pickles by value must ask here: a table that they named directly would be copied with them.
    """
    return OPEN_CALLS.get(call) if isinstance(call, CallId) else None


def _this_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    return task
