"""Use of the machine's cores during a measurement: by the service's processes, grouped by what they do, and idle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from motley.cluster.process_tree import descendants


class CoreUsage:
    """Meter of the CPU time that is used from its creation on. Without /proc it finds nothing.

    root  process id of the service
    part  returns the group that a process belongs to, from its command line
    """

    def __init__(self, root: int, part: Callable[[str], str]) -> None:
        self._root, self._part = root, part
        self._began, self._spent = time.monotonic(), self._sample()

    def used(self) -> dict[str, float]:
        """Return the cores used on average by each group; `idle` is the idle cores of the whole machine."""
        seconds, now = time.monotonic() - self._began, self._sample()
        used: dict[str, float] = {}
        for (part, pid), spent in now.items():
            used[part] = used.get(part, 0.0) + spent - self._spent.get((part, pid), 0.0)
        return {part: round(spent / seconds, 3) for part, spent in sorted(used.items())}

    def _sample(self) -> dict[tuple[str, int], float]:
        """Return the CPU seconds used so far, by group and process id."""
        ticks = os.sysconf("SC_CLK_TCK")
        found = {}
        for pid in (self._root, *descendants(self._root)):
            with suppress(OSError):  # it has ended
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                name = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                found[self._part(name), pid] = (int(fields[11]) + int(fields[12])) / ticks
        with suppress(OSError):
            whole = Path("/proc/stat").read_text().split("\n", 1)[0].split()
            found["idle", 0] = int(whole[4]) / ticks
        return found
