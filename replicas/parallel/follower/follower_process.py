"""Entry point of another process of a model: `python -m motley.replicas.parallel.follower.follower_process ENDS`.

It sends its first heartbeat before it imports anything large. ENDS is JSON: the parent's process id, and file
descriptors by name.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping

from ...host.process_logging import log_to_stderr
from ..transport.heartbeats import HeartbeatSender
from ..transport.pipe import MessagePipe

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def run_follower(ends: Mapping[str, int]) -> None:
    """Do what the first process sends by `ends`, until it closes them. Raises whatever a step raises."""
    pipe = MessagePipe(ends["reads"], ends["writes"])
    heartbeats = HeartbeatSender(pipe)
    with heartbeats.during("imports its libraries"):
        from .follower_loop import serve_follower
    serve_follower(pipe, ends, heartbeats)


def main() -> None:
    said = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # works even while it is stopped, or computes
    if os.getppid() != said["parent"]:
        return  # the parent ended before the line above took effect
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to the parent as well, which ends it
    log_to_stderr()
    run_follower(said["ends"])


if __name__ == "__main__":
    main()
