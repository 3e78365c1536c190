"""Signs of life: each process says every BEAT_S that it lives and what it does; whoever hears no more loses it.

How long a model takes to load or a step to compute nobody can tell beforehand, so nothing is limited but silence, and,
of a process that serves, how long its computing thread stands still while another still says that it lives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ..errors import EngineLost
from .pipe import Pipe

__all__ = ["BEAT_S", "START_S", "Beats", "Heard", "Patience", "Watch"]

BEAT_S = 1.0
START_S = 300.0  # until a process begins at all, which may be another's to start


class Beats:
    """Says so from its start on, by a thread of its own, until the other end is closed."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._doing = pipe, "starts"
        self._computes: _Stillness | None = None
        self._changed = threading.Event()
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def says(self, doing: str) -> None:
        """From now on, and at once."""
        self._doing = doing
        self._changed.set()

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Afterwards what it did before goes on."""
        before = self._doing
        self.says(doing)
        yield
        self.says(before)

    def of_bytes(self, done: int, total: int) -> None:
        """How far it has loaded."""
        self._doing = f"loads weights, {done / 1e6:.0f} of {total / 1e6:.0f} MB"

    def of_this_thread(self, least_s: float = 0.0) -> None:
        """From now on they also say for how long this one stands still, which looks about itself every LOOK_S wherever
        it waits for others.

        least_s  before which nothing is said of that
        """
        if _is_fine():
            self._computes = _Stillness(least_s)

    def _beat(self) -> None:
        try:
            while True:
                self._changed.clear()
                still_s = 0.0 if self._computes is None else self._computes.seconds
                self._pipe.send({"doing": self._doing, **({"still_s": still_s} if still_s else {})})
                if not self._changed.wait(BEAT_S) and self._computes is not None:
                    self._computes.look()
        except (EngineLost, OSError):
            return  # whoever computes finds that out by itself


class _Stillness:
    """Of the thread that makes it, which has no CPU time: it hangs in a lock, in a read or in the kernel. Looks of
    another thread are BEAT_S apart: where both were held up, nothing is charged to it.
    """

    def __init__(self, least_s: float) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._last, self._looks, self._least_s = time.clock_gettime_ns(self._clock), 0, least_s

    @property
    def seconds(self) -> float:
        still_s = self._looks * BEAT_S
        return still_s if still_s >= self._least_s else 0.0

    def look(self) -> None:
        now = time.clock_gettime_ns(self._clock)
        self._looks = self._looks + 1 if now == self._last else 0
        self._last = now


def _is_fine() -> bool:
    """Whether the clock of a thread's CPU time shows that it has woken up; some kernels count in ticks."""
    for _ in range(8):
        before = time.thread_time_ns()
        sum(range(100))
        if time.thread_time_ns() == before:
            return False
    return True


class Heard(Protocol):
    """A process as others hear of it.

    heard     monotonic seconds of the last sign of life; doing: what it said then
    still_s   for how long its computing thread had stood still by then; 0: it had not
    starting  it has not begun: nothing can be heard of it
    """

    name: str
    doing: str
    still_s: float

    @property
    def starting(self) -> bool: ...

    @property
    def heard(self) -> float: ...


class Patience:
    """For so many seconds of silence, or of standing still, as each look is told. Looks are BEAT_S apart: whoever was
    held up itself charges it to nobody.

    Until a process begins, for START_S.
    """

    def __init__(self, others: Sequence[Heard], limit_s: Callable[[], float]) -> None:
        self._others, self._limit_s = others, limit_s
        self._last = [(other.heard, other.starting) for other in others]
        self._looks = [0] * len(others)

    def look(self) -> None:
        """After BEAT_S more. Raises EngineLost, naming one that has said or computed nothing for so long."""
        for number, other in enumerate(self._others):
            now = other.heard, other.starting
            self._looks[number] = self._looks[number] + 1 if now == self._last[number] else 0
            self._last[number] = now
            limit_s = START_S if other.starting else self._limit_s()
            if self._looks[number] * BEAT_S >= limit_s:
                raise EngineLost(f"{other.name} has said nothing for {limit_s:g} s; the last was: {other.doing}")
            if other.still_s >= limit_s:
                still = f"says that it lives, but has not computed for {other.still_s:g} s"
                raise EngineLost(f"{other.name} {still}; the last was: {other.doing}")


class Watch:
    """Looks all the time, by a thread of its own, until it is closed. lost: told once, by whom nothing is said."""

    def __init__(
        self, others: Sequence[Heard], limit_s: Callable[[], float], lost: Callable[[EngineLost], None]
    ) -> None:
        self._patience, self._lost, self._closed = Patience(others, limit_s), lost, threading.Event()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                self._patience.look()
            except EngineLost as error:
                self._lost(error)
                return
