"""The process of a follower on the stand-in for a GPU: `python late_follower.py WHAT ENDS`, started by `LateProcesses`.

WHAT:   serves
        cannot_capture   its second graph
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from late_device import LateDevice, LateOps
from late_exchange import LateExchange

from motley.replicas import build
from motley.replicas.shards import follower, follower_process, gpu_follower
from motley.replicas.shards.launch import Subprocesses


class LateProcesses(Subprocesses):
    """Implements `Launcher`. what: of all of them."""

    def __init__(self, what: str = "serves") -> None:
        self.run = (str(Path(__file__)), what)


class CannotCapture(LateDevice):
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.captures:
            raise MemoryError("no room for a graph")
        return super().capture(work)


def main() -> None:
    what = sys.argv.pop(1)
    device = {"serves": LateDevice, "cannot_capture": CannotCapture}[what]
    build.operators = lambda *_: (LateOps(), "tests")
    follower.accelerator_of = lambda _: device()
    follower.CollectiveExchange = LateExchange  # type: ignore[misc]
    gpu_follower.IDLE_S = 0.0  # what it was told is done when no more is there to be told
    follower_process.main()


if __name__ == "__main__":
    main()
