"""Heartbeats between the processes of one model, and the detection of a process that is lost.

Each process sends a heartbeat every HEARTBEAT_S seconds that says what it is doing. How long a model takes to load or
a step to compute cannot be known beforehand, so only two things are limited: how long a process may send nothing and,
once it serves, how long its computing thread may use no CPU time while its heartbeats still arrive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ...errors import EngineLost
from .pipe import MessagePipe

HEARTBEAT_S = 1.0
STARTUP_TIMEOUT_S = 300.0  # most seconds until a process begins: something else may have to start it


class HeartbeatSender:
    """Background thread that sends heartbeats of this process over a pipe, from its construction until the other end is
    closed.
    """

    def __init__(self, pipe: MessagePipe) -> None:
        self._pipe, self._doing = pipe, "starts"
        self._computes: _ThreadStallDetector | None = None
        self._changed = threading.Event()
        threading.Thread(target=self._beat, name="heartbeats", daemon=True).start()

    def says(self, doing: str) -> None:
        """Set the activity that heartbeats report, and send one at once."""
        self._doing = doing
        self._changed.set()

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Context manager that reports `doing` as the activity inside it, and the previous activity afterwards."""
        before = self._doing
        self.says(doing)
        yield
        self.says(before)

    def report_bytes(self, done: int, total: int) -> None:
        """Report in heartbeats how many of the `total` bytes of weights have been loaded."""
        self._doing = f"loads weights, {done / 1e6:.0f} of {total / 1e6:.0f} MB"

    def watch_current_thread(self, min_stall_s: float = 0.0) -> None:
        """Let heartbeats also report for how long the calling thread has used no CPU time.

        The thread is expected to wake up at short intervals wherever it waits for other processes. Nothing is
        reported where the kernel measures CPU time too coarsely.

        min_stall_s  shortest standstill in seconds that is reported
        """
        if _has_fine_cpu_clock():
            self._computes = _ThreadStallDetector(min_stall_s)

    def _beat(self) -> None:
        try:
            while True:
                self._changed.clear()
                still_s = 0.0 if self._computes is None else self._computes.seconds
                self._pipe.send({"doing": self._doing, **({"still_s": still_s} if still_s else {})})
                if not self._changed.wait(HEARTBEAT_S) and self._computes is not None:
                    self._computes.poll()
        except (EngineLost, OSError):
            return  # the other process has gone, which the computing thread finds out by itself


class _ThreadStallDetector:
    """Measurement of how long the thread that constructs it has used no CPU time, because it hangs in a lock, a read or
    the kernel.

    Another thread looks every HEARTBEAT_S seconds and counts looks, not seconds: where the whole process was held up,
    nothing is charged to the measured thread.
    """

    def __init__(self, min_stall_s: float) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._last, self._polls, self._min_stall_s = time.clock_gettime_ns(self._clock), 0, min_stall_s

    @property
    def seconds(self) -> float:
        still_s = self._polls * HEARTBEAT_S
        return still_s if still_s >= self._min_stall_s else 0.0

    def poll(self) -> None:
        now = time.clock_gettime_ns(self._clock)
        self._polls = self._polls + 1 if now == self._last else 0
        self._last = now


def _has_fine_cpu_clock() -> bool:
    """Return whether the CPU clock of a thread is fine enough to show that the thread woke up; some kernels count in
    ticks.
    """
    for _ in range(8):
        before = time.thread_time_ns()
        sum(range(100))
        if time.thread_time_ns() == before:
            return False
    return True


class HeartbeatPeer(Protocol):
    """A process as the others know it from its heartbeats.

    heard     monotonic seconds of its last sign of life
    doing     activity that it reported then
    still_s   seconds for which its computing thread had used no CPU time by then; 0 if it was running
    starting  whether the process has not begun yet, so that it cannot send anything
    """

    name: str
    doing: str
    still_s: float

    @property
    def starting(self) -> bool: ...

    @property
    def heard(self) -> float: ...


class HeartbeatChecker:
    """Checker of several processes: that each still sends heartbeats and still computes.

    A process is lost once it was silent, or its computing thread stood still, for `limit_s()` seconds; one that has not
    begun yet has STARTUP_TIMEOUT_S seconds. Time is counted in looks that are HEARTBEAT_S seconds apart, so that a
    caller which was itself held up charges this to nobody.
    """

    def __init__(self, others: Sequence[HeartbeatPeer], limit_s: Callable[[], float]) -> None:
        self._others, self._limit_s = others, limit_s
        self._last = [(other.heard, other.starting) for other in others]
        self._polls = [0] * len(others)

    def poll(self) -> None:
        """Check every process once; to be called every HEARTBEAT_S seconds.

        Raises EngineLost, which names the first process that has sent or computed nothing for its limit.
        """
        for number, other in enumerate(self._others):
            now = other.heard, other.starting
            self._polls[number] = self._polls[number] + 1 if now == self._last[number] else 0
            self._last[number] = now
            limit_s = STARTUP_TIMEOUT_S if other.starting else self._limit_s()
            if self._polls[number] * HEARTBEAT_S >= limit_s:
                raise EngineLost(
                    f"{other.name} has sent no heartbeat for {limit_s:g} s; its last activity: {other.doing}"
                )
            if other.still_s >= limit_s:
                still = f"sends heartbeats, but has not computed for {other.still_s:g} s"
                raise EngineLost(f"{other.name} {still}; its last activity: {other.doing}")


class HeartbeatMonitor:
    """Background thread that checks the heartbeats of other processes every HEARTBEAT_S seconds until it is closed.

    lost  callback that is called once, with an EngineLost that names the process, when one is lost; the thread then
          ends
    """

    def __init__(
        self, others: Sequence[HeartbeatPeer], limit_s: Callable[[], float], lost: Callable[[EngineLost], None]
    ) -> None:
        self._checker, self._lost, self._closed = HeartbeatChecker(others, limit_s), lost, threading.Event()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            try:
                self._checker.poll()
            except EngineLost as error:
                self._lost(error)
                return
