"""The process of a follower: `python -m motley.replicas.shards.follower_process ENDS`, started by launch.py.

It says that it lives before it imports anything heavy. ENDS: JSON, the parent's process id and descriptors by name.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping

from ..logs import log_to_stderr
from .beats import Beats
from .pipe import Pipe

__all__ = ["follow"]

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def follow(ends: Mapping[str, int]) -> None:
    """What the first process says by `ends`, until it closes them. Raises whatever a step does."""
    pipe = Pipe(ends["reads"], ends["writes"])
    beats = Beats(pipe)
    with beats.during("imports its libraries"):
        from .follower import serve
    serve(pipe, ends, beats)


def main() -> None:
    said = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # even when it is stopped, or computes
    if os.getppid() != said["parent"]:
        return  # it ended before this process had asked to end with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for its parent, which ends it
    log_to_stderr()
    follow(said["ends"])


if __name__ == "__main__":
    main()
