"""Signs of life: each process says every BEAT_S that it lives and what it does; whoever hears no more loses it.

How long a model takes to load nobody can tell beforehand, so nothing is limited but silence.
"""

from __future__ import annotations

import threading
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

    def _beat(self) -> None:
        try:
            while True:
                self._changed.clear()
                self._pipe.send({"doing": self._doing})
                self._changed.wait(BEAT_S)
        except (EngineLost, OSError):
            return  # whoever computes finds that out by itself


class Heard(Protocol):
    """A process as others hear of it.

    heard     monotonic seconds of the last sign of life; doing: what it said then
    starting  it has not begun: nothing can be heard of it
    """

    name: str
    doing: str

    @property
    def starting(self) -> bool: ...

    @property
    def heard(self) -> float: ...


class Patience:
    """For so many seconds of silence, as each look is told. Looks are BEAT_S apart: whoever was held up itself charges
    it to nobody.

    Until a process begins, for START_S.
    """

    def __init__(self, others: Sequence[Heard], limit_s: Callable[[], float]) -> None:
        self._others, self._limit_s = others, limit_s
        self._last = [(other.heard, other.starting) for other in others]
        self._looks = [0] * len(others)

    def look(self) -> None:
        """After BEAT_S more. Raises EngineLost, naming one that has said nothing for so long, and what it did last."""
        for number, other in enumerate(self._others):
            now = other.heard, other.starting
            self._looks[number] = self._looks[number] + 1 if now == self._last[number] else 0
            self._last[number] = now
            limit_s = START_S if other.starting else self._limit_s()
            if self._looks[number] * BEAT_S >= limit_s:
                raise EngineLost(f"{other.name} has said nothing for {limit_s:g} s; the last was: {other.doing}")


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
