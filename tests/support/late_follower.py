"""The process of a follower on the stand-in for a GPU: `python late_follower.py WHAT SAYS ENDS`, by `LateProcesses`.

WHAT:   serves
        cannot_capture   its second graph
        has_no_room      for weights the first time that it has to make any
        unlike           by operators that are told from the others'
        on_cpu           without a stand-in
SAYS:   JSON, what it says of its device in the place of what that is
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from late_device import LateDevice, LateOps
from late_exchange import LateExchange

from motley.replicas.loading import operator_choice
from motley.replicas.parallel.follower import follower_loop, follower_process, gpu_follower
from motley.replicas.parallel.follower.weight_versions import WeightVersions
from motley.replicas.parallel.leader.launcher import ProcessHandle, SubprocessLauncher
from motley.replicas.parallel.planning.device_report import DeviceReport


class LateProcesses(SubprocessLauncher):
    """Implements `Launcher`. what, says: of each; what: or of all."""

    def __init__(self, what: str | Sequence[str] = "serves", says: Sequence[Mapping[str, Any]] = ()) -> None:
        self._what, self._says = what, says

    def launch(self, number: int, name: str, ends: Mapping[str, int]) -> ProcessHandle:
        said = self._says[number - 1] if self._says else {}
        what = self._what if isinstance(self._what, str) else self._what[number - 1]
        self.run = (str(Path(__file__)), what, json.dumps(said))
        return super().launch(number, name, ends)


class Tight(LateDevice):
    free = 0

    def free_bytes(self) -> int:
        free, self.free = self.free, LateDevice.free
        return free


class Forgetful(WeightVersions):
    """Sees that nothing has those weights any more, by counting references alone: no process looks for cycles."""

    def forget(self, version: int) -> None:
        gone = weakref.ref(self.decoder(version)) if version in self._loaded else None
        gc.disable()
        super().forget(version)
        left = gone is not None and gone() is not None
        gc.enable()
        if left:
            raise RuntimeError(f"weights of version {version} stay")


class CannotCapture(LateDevice):
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.captures:
            raise MemoryError("no room for a graph")
        return super().capture(work)


class Unlike(LateOps):
    @property
    def arithmetic(self) -> str:
        return "of another card"


def main() -> None:
    what, said = sys.argv.pop(1), json.loads(sys.argv.pop(1))
    here = follower_loop.report_local_device

    def says(*given: Any, **known: Any) -> DeviceReport:
        return replace(here(*given, **known), **said)

    follower_loop.report_local_device = says
    follower_loop.WeightVersions = Forgetful  # type: ignore[misc]
    if what != "on_cpu":
        device = {"cannot_capture": CannotCapture, "has_no_room": Tight}.get(what, LateDevice)
        operator_choice.choose_operators = lambda *_: (Unlike() if what == "unlike" else LateOps(), "tests")
        follower_loop.open_accelerator = lambda _: device()
        follower_loop.CollectiveExchange = LateExchange  # type: ignore[misc]
        gpu_follower.IDLE_S = 0.0  # what it was told is done when no more is there to be told
    follower_process.main()


if __name__ == "__main__":
    main()
