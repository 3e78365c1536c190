"""Ends what is left of a service whose `motley serve` was killed, and removes its folder. A small process beside it.

Most of Ray's processes end with the one that started them; HAProxy does not, as it outlives its manager on purpose, and
a process that is stopped ends for nobody. The guardian waits for the end of a pipe, which no death of `motley serve`
can keep open. What belongs to the service it tells by the folder's name, in each process's environment or command.

Runs as a program too, and then imports the standard library only. Argument: the service's own folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "MOTLEY_SERVE_FOLDER"  # in the environment of each process of a service
ENDED = b"ended"  # what `motley serve` says when it has ended all by itself
END_S = 30.0
_POLL_S = 0.1


class Guardian:
    """The process, of the service that keeps its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # In a session of its own: Ctrl-C and a service manager's signal to all are for those that it ends.
        self._process = subprocess.Popen(
            [sys.executable, "-IS", __file__, str(self._folder)], stdin=subprocess.PIPE, start_new_session=True
        )

    def look(self) -> None:
        """Start it again if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            self.start()

    def stop(self) -> None:
        """It has nothing to do any more."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            process.communicate(ENDED, timeout=2.0)
        process.kill()
        process.wait()


def belong(folder: str) -> Iterator[int]:
    """Processes of that service, but for this one."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or is another user's
            if int(process.name) != os.getpid() and _is_of(process, folder.encode()):
                yield int(process.name)


def _is_of(process: Path, folder: bytes) -> bool:
    if (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
        return False
    mark = MARK.encode() + b"=" + folder + b"\0"
    return mark in (process / "environ").read_bytes() or folder + b"/" in (process / "cmdline").read_bytes()


def end_all(folder: str, seconds: float = END_S) -> None:
    deadline = time.monotonic() + seconds
    while (left := [*belong(folder)]) and time.monotonic() < deadline:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def main(folder: str) -> None:
    if sys.stdin.buffer.read() != ENDED:
        end_all(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
