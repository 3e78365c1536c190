"""A follower whose main thread stands still: `python stuck_follower.py WHAT WHEN ENDS`, by `Stuck`, once WHEN exists.

WHAT:   in_a_call       it reads what nobody writes, for ever, while its other threads go on
        between_calls   likewise, before it takes the next
        computes        for COMPUTES_S, and then goes on
        compiles        likewise, without CPU time of its own, on the stand-in for a GPU
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import late_follower

from motley.replicas.parallel.calls import decoder_calls
from motley.replicas.parallel.follower import follower_process
from motley.replicas.parallel.leader.launcher import ProcessHandle, SubprocessLauncher
from motley.replicas.parallel.transport import pipe

COMPUTES_S = 8.0


class Stuck(SubprocessLauncher):
    """Implements `Launcher`. number: of the process; when: the file; far: ranks exchange over TCP."""

    def __init__(self, what: str, when: Path, number: int = 1, *, far: bool = False) -> None:
        self._what, self._when, self._number, self._far = what, when, number, far

    def host(self) -> str | None:
        return "127.0.0.1" if self._far else None

    def launch(self, number: int, name: str, ends: Mapping[str, int]) -> ProcessHandle:
        stuck = (str(Path(__file__)), self._what, str(self._when))
        self.run = stuck if number == self._number else SubprocessLauncher.run
        return super().launch(number, name, ends)


def _reads() -> None:
    os.read(os.pipe()[0], 1)


def _computes() -> None:
    until = time.monotonic() + COMPUTES_S
    while time.monotonic() < until:
        sum(range(1000))


def main() -> None:
    what, when = sys.argv.pop(1), Path(sys.argv.pop(1))
    does = {"computes": _computes, "compiles": lambda: time.sleep(COMPUTES_S)}.get(what, _reads)

    def first(method: Callable[..., Any]) -> Callable[..., Any]:
        def stands(*given: Any, **known: Any) -> Any:
            if when.exists():
                when.unlink()
                does()
            return method(*given, **known)

        return stands

    if what == "between_calls":
        pipe.MessageInbox.receive = first(pipe.MessageInbox.receive)  # type: ignore[method-assign]
    else:
        decoder_calls.execute_call = first(decoder_calls.execute_call)
    if what == "compiles":
        sys.argv[1:1] = ["serves", "{}"]
        late_follower.main()
    else:
        follower_process.main()


if __name__ == "__main__":
    main()
