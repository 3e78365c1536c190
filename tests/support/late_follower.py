"""The process of a follower on the stand-in for a GPU: `python late_follower.py WHAT SAYS ENDS`, by `LateProcesses`.

WHAT:   serves
        cannot_capture   its second graph
        on_cpu           without a stand-in
SAYS:   JSON, what it says of its device in the place of what that is
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from late_device import LateDevice, LateOps
from late_exchange import LateExchange

from motley.replicas import build
from motley.replicas.shards import follower, follower_process, gpu_follower
from motley.replicas.shards.launch import Handle, Subprocesses
from motley.replicas.shards.places import Account


class LateProcesses(Subprocesses):
    """Implements `Launcher`. what, says: of each; what: or of all."""

    def __init__(self, what: str | Sequence[str] = "serves", says: Sequence[Mapping[str, Any]] = ()) -> None:
        self._what, self._says = what, says

    def launch(self, number: int, name: str, ends: Mapping[str, int]) -> Handle:
        said = self._says[number - 1] if self._says else {}
        what = self._what if isinstance(self._what, str) else self._what[number - 1]
        self.run = (str(Path(__file__)), what, json.dumps(said))
        return super().launch(number, name, ends)


class CannotCapture(LateDevice):
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.captures:
            raise MemoryError("no room for a graph")
        return super().capture(work)


def main() -> None:
    what, said = sys.argv.pop(1), json.loads(sys.argv.pop(1))
    here = follower.account_here

    def says(*given: Any, **known: Any) -> Account:
        return replace(here(*given, **known), **said)

    follower.account_here = says
    if what != "on_cpu":
        device = {"serves": LateDevice, "cannot_capture": CannotCapture}[what]
        build.operators = lambda *_: (LateOps(), "tests")
        follower.accelerator_of = lambda _: device()
        follower.CollectiveExchange = LateExchange  # type: ignore[misc]
        gpu_follower.IDLE_S = 0.0  # what it was told is done when no more is there to be told
    follower_process.main()


if __name__ == "__main__":
    main()
