"""Processes that this one started, directly or indirectly, and their end."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def become_subreaper() -> None:
    """Make orphans among this process's descendants its children (Linux), so that `descendants` sees them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int | None = None) -> list[int]:
    """Return the living processes below `root` (default: this one), parents first. Empty if there is no /proc."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):  # not "[0-9]*/stat": glob fails at one that ends as it looks
        with suppress(OSError):  # it ended meanwhile
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(process.name))
    found = [os.getpid() if root is None else root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process; one that only waits for a busy machine is not stopped."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def end_descendants(*, polite_s: float, timeout_s: float) -> list[int]:
    """Wait, then send SIGTERM, then SIGKILL. Returns the processes that are left, which should be none."""
    for number, seconds in ((None, polite_s), (signal.SIGTERM, timeout_s), (signal.SIGKILL, timeout_s)):
        if number is not None:
            _signal_all(number)
        if wait_until(lambda: not _reap_and_list(), seconds):
            return []
    return _reap_and_list()


def _signal_all(number: signal.Signals) -> None:
    for pid in descendants():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap_and_list() -> list[int]:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants()


def wait_until(condition: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Wait for a condition; return whether it came true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
