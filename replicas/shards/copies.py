"""Which copies between KV and the host the other processes of a model have made."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ..errors import EngineLost

__all__ = ["Copied", "Copies"]


class Copies:
    """By numbers, from 1 on: each process makes all of them, in their order. From any thread.

    asked  the number of the last one that was asked for
    """

    def __init__(self, processes: int) -> None:
        self.asked = 0
        self._made = [0] * processes
        self._lost = False
        self._changed = threading.Condition()

    def made(self, process: int, number: int) -> None:
        """All up to that one, by that process."""
        with self._changed:
            self._made[process] = number
            self._changed.notify_all()

    def lose(self) -> None:
        """A process has ended."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Until all have made it. Raises EngineLost where one never will.

        One that hangs is waited for until a step finds that out: no step waits here.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost or min(self._made) >= number)
            if self._lost:
                raise EngineLost("KV was not copied: a process of the model has ended")


@dataclass(frozen=True, slots=True)
class Copied:
    """Implements `Mark`: of the end of the copies up to that number."""

    copies: Copies
    number: int

    def wait(self) -> None:
        self.copies.wait(self.number)
