"""Liveness of replicas: when a stream is silent, its replica is probed."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable

from ....replicas.errors import DeadlineExceeded, MotleyError, Unavailable
from .call_attempt import CallAttempt, NoReplicaInPool
from .placement import SuspectReplicas

log = logging.getLogger(__name__)

ELSEWHERE_S = 1.0  # a pool that offers no replica for this long has lost them all
LivenessProbe = Callable[[str], Awaitable[object]]  # probes the replica of that name; returns if it is healthy


class LivenessMonitor:
    """Monitor that ends the attempts of one ingress whose replica has been silent for `stall_s`.

    A replica is alive if one of its streams advances, or if it answers a probe, so a long prefill or a long queue
    does not count as a hang. Each silent replica is probed once, not once for each stream, and not at all while streams
    advance.
    """

    def __init__(self, probe: LivenessProbe, suspects: SuspectReplicas, stall_s: float) -> None:
        self._probe = probe
        self._suspects = suspects
        self._stall_s = stall_s
        self._tick_s = min(stall_s / 5, 1.0)
        self._attempts: set[CallAttempt] = set()
        self._alive: dict[str, float] = {}  # replica -> when it last showed that it lives
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._awake_since = 0.0

    def watch(self, attempt: CallAttempt) -> None:
        self._attempts.add(attempt)
        if self._timer is None:
            self._arm()

    def forget(self, attempt: CallAttempt) -> None:
        self._attempts.discard(attempt)

    def interrupt_all(self, error: MotleyError) -> None:
        for attempt in self._attempts:
            attempt.interrupt(error)

    def moved(self, attempt: CallAttempt) -> None:
        """Record that a message came, which shows that its replica is alive."""
        if attempt.replica is not None:
            self.lives(attempt.replica)

    def lives(self, replica: str) -> None:
        self._alive[replica] = asyncio.get_running_loop().time()
        self._suspects.clear(replica)

    def _arm(self) -> None:
        # In an empty context: in that of the first request, Serve would take all probes for calls of that request.
        loop = asyncio.get_running_loop()
        due = loop.time() + self._tick_s
        self._timer = loop.call_at(due, self._tick, due, context=contextvars.Context())

    def _tick(self, due: float) -> None:
        now = asyncio.get_running_loop().time()
        self._timer = None
        if now - due > self._tick_s:
            self._awake_since = now  # this process itself stood still, so replicas could not be heard
        for attempt in [attempt for attempt in self._attempts if attempt.waiting]:
            self._check(attempt, now)
        for replica in self._suspects:
            self._inquire(replica)  # a suspect that is alive should not stay idle for long
        if self._attempts or any(self._suspects):
            self._arm()
        else:
            self._alive.clear()

    def _check(self, attempt: CallAttempt, now: float) -> None:
        replica = attempt.replica
        if now > attempt.deadline:
            attempt.interrupt(DeadlineExceeded("the deadline passed before the answer was complete"))
        elif replica is None:
            if attempt.placement.elsewhere:
                if now - attempt.waiting_since > ELSEWHERE_S:
                    attempt.interrupt(NoReplicaInPool("this pool has no replica any more"))
            elif now - attempt.waiting_since > attempt.wait_s:
                attempt.interrupt(Unavailable("no replica can take the request; try again shortly", code="no_replica"))
        elif now - max(attempt.waiting_since, self._alive.get(replica, 0.0), self._awake_since) > self._stall_s:
            if replica not in self._suspects:
                log.warning(
                    "replica %s has shown no sign of life for %g s; its requests are tried elsewhere",
                    replica,
                    self._stall_s,
                )
            self._suspects.add(replica)
            attempt.interrupt(Unavailable("the replica does not answer", code="replica_stalled"))
        else:
            self._inquire(replica)

    def _inquire(self, replica: str) -> None:
        if replica not in self._probes:
            self._probes[replica] = asyncio.create_task(self._probe_replica(replica))

    async def _probe_replica(self, replica: str) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._probe(replica)
            self.lives(replica)
        except (MotleyError, TimeoutError) as error:
            log.info("replica %s reports that it is not healthy: %s", replica, error)
        finally:
            del self._probes[replica]
