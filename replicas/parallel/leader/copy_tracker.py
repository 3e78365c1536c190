"""Record of which copies between KV and the host the other processes of a model have made."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ...errors import EngineLost


class CopyTracker:
    """Progress of numbered copies of KV, from 1 on, in the other processes, each of which makes all copies in order.

    All methods may be called from any thread.

    num_requested  number of the last copy that was requested
    """

    def __init__(self, processes: int) -> None:
        self.num_requested = 0
        self._made = [0] * processes
        self._lost = False
        self._changed = threading.Condition()

    def made(self, process: int, number: int) -> None:
        """Record that a process has made all copies of KV up to `number`."""
        with self._changed:
            self._made[process] = number
            self._changed.notify_all()

    def lose(self) -> None:
        """Record that a process has ended: all waits for copies raise EngineLost, those that come later too."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Wait until all processes have made copy `number`. Raises EngineLost where one has ended and never will.

        A process that hangs is waited for until a step finds that out; no step waits here.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost or min(self._made) >= number)
            if self._lost:
                raise EngineLost("KV was not copied: a process of the model has ended")


@dataclass(frozen=True, slots=True)
class TrackedCopyEvent:
    """Mark of the end of all copies up to `number` in the other processes. Implements `CopyEvent`."""

    copies: CopyTracker
    number: int

    def wait(self) -> None:
        self.copies.wait(self.number)
