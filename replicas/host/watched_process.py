"""Processes that were stopped (SIGSTOP): they would never answer, and no limit of their own can end them.

Linux tells their state. A process that waits for a core is in another one, so that a busy machine ends none. Without
/proc no process counts as stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path

log = logging.getLogger(__name__)

POLL_S = 1.0  # seconds between two looks at a process that is silent while it has work
# A tracer stops a process for a moment at each system call, and a service that is continued wakes one by one.
STOPPED_TIMEOUT_S = 1.0  # seconds that a process is stopped, and gets no CPU time, until it counts as stopped


class WatchedProcess:
    """Process that is looked at while it is silent. Safe to use from threads."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._began = _ProcessStat.of(pid).began
        self._since: tuple[float, int] | None = None  # when it was first seen stopped, monotonic; its CPU time then

    def is_stopped(self) -> bool:
        """Return whether it has been stopped for STOPPED_TIMEOUT_S seconds, as far as these looks tell."""
        seen = _ProcessStat.of(self.pid)
        if not self._stopped_now(seen):
            self._since = None
            return False
        if self._since is None or self._since[1] != seen.cpu_ticks:
            self._since = time.monotonic(), seen.cpu_ticks
        return time.monotonic() - self._since[0] >= STOPPED_TIMEOUT_S

    def is_gone(self) -> bool:
        """Return whether it has ended."""
        seen = _ProcessStat.of(self.pid)
        return seen.began != self._began or seen.state in ("Z", "X")

    def end_if_stopped(self, *, at_once: bool = False) -> bool:
        """Kill the process if it is stopped; return whether it was. `at_once`: even if it has only just been."""
        if not (self._stopped_now(_ProcessStat.of(self.pid)) if at_once else self.is_stopped()):
            return False
        log.warning("process %d was stopped (SIGSTOP): it is ended", self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return True

    def _stopped_now(self, seen: _ProcessStat) -> bool:
        return seen.state in ("T", "t") and seen.began == self._began  # else another process has its number by now


class _ProcessStat:
    """State, start time and processor time of a process, read from /proc/PID/stat; empty if there is no such process.

    began      clock ticks from the machine's start to the process's: tells apart two processes with one number
    cpu_ticks  clock ticks of processor time used so far
    """

    def __init__(self, state: str = "", began: str = "", cpu_ticks: int = 0) -> None:
        self.state, self.began, self.cpu_ticks = state, began, cpu_ticks

    @classmethod
    def of(cls, pid: int) -> _ProcessStat:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return cls()
        return cls(fields[0], fields[19], int(fields[11]) + int(fields[12]))
