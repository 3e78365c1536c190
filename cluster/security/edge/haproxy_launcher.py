"""Program that Serve runs in place of HAProxy: it edits the configuration and starts HAProxy. Imports the standard
library only.

Arguments: the file of edits that `haproxy_config.py` wrote, HAProxy's binary, then Serve's own arguments for HAProxy.
Serve writes the configuration anew before each start; here it is edited first. An edit that does not match as often as
it must is an error and HAProxy does not start: no service is better than one that listens differently from what was
asked.

HAProxy outlives its manager, whose successor takes over; it ends with the service (process_tree.py, guardian.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

MARK = "# edited by motley\n"
MAX_RELIEVED = 32  # workers that still finish streams after a reload; 14 MB each


def edit_config(config: str, edits: list[list[object]]) -> str:
    """Apply edits, each [pattern, replacement, number of matches or None]. Raises ValueError for another number of
    matches.
    """
    if config.startswith(MARK):
        return config
    for pattern, replacement, times in edits:
        config, found = re.subn(str(pattern), str(replacement), config, flags=re.MULTILINE)
        if times is not None and found != times:
            raise ValueError(f"HAProxy's configuration has {found} of {pattern!r}, not {times}")
    return MARK + config


def replaced_workers(arguments: Sequence[str]) -> list[int]:
    """Return the workers that the new one replaces, and which finish their streams: the process ids after `-sf`."""
    if "-sf" not in arguments:
        return []
    rest = arguments[arguments.index("-sf") + 1 :]
    end = next((at for at, word in enumerate(rest) if not word.isdigit()), len(rest))
    return [int(word) for word in rest[:end]]


def process_start_ticks(pid: int) -> int:
    """Return a process's start time in the kernel's clock ticks; 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def surplus_workers(pids: Sequence[int], began: Callable[[int], int] = process_start_ticks) -> list[int]:
    """Return the oldest processes, as many as there are beyond MAX_RELIEVED."""
    return sorted(pids, key=began)[: max(0, len(pids) - MAX_RELIEVED)]


def main(edits_path: str, binary: str, *arguments: str) -> None:
    if "-f" in arguments:
        path = Path(arguments[arguments.index("-f") + 1])
        part = path.with_name(path.name + ".part")
        part.write_text(edit_config(path.read_text(), json.loads(Path(edits_path).read_text())))
        part.replace(path)
    with suppress(PermissionError):  # it has a session already
        os.setsid()  # Ray kills the process group of a worker that dies, and HAProxy is to live on
    for pid in surplus_workers(replaced_workers(arguments)):
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    # Serve's configuration says `option splice-request`. With that, HAProxy 2.8 does not see the disconnect of a client
    # whose body came in a second packet, as most clients send it: the sequence would run to its end. -dS disables it.
    os.execv(binary, [binary, "-dS", *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
