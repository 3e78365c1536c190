"""HAProxy's processes on this machine, found by their configuration file.

A reload leaves a worker that finishes its streams, however long they are, and accepts nothing new.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def haproxy_workers(config: Path) -> list[int]:
    """Return the processes that were started with this configuration file, in no order; none if there is no /proc."""
    arguments = ["-f", str(config)]
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            command_line = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if (
                any(command_line[at : at + 2] == arguments for at in range(len(command_line)))
                and "/haproxy" in command_line[0]
            ):
                found.append(int(process.name))
    return found
