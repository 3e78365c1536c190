"""Guardian: a small process that ends what is left of a service whose `motley serve` was killed, and removes its
folder and its ready file.

Most of Ray's processes end with the one that started them; HAProxy does not, as it outlives its manager on purpose, and
a stopped process does not end by itself. The guardian waits for the end of a pipe, which closes however `motley serve`
dies. To the service belong the processes whose environment has its mark, those that the guardian saw below
`motley serve` while that lived, and all that these have started. A process that only reads its files is left alone.

Runs as a program too, and then imports the standard library only. Arguments: the service's folder, its process id, and
the path of its ready file or an empty text.
"""

from __future__ import annotations

import json
import os
import select
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
_POLL_INTERVAL_S = 2.0  # interval of the checks of what there is below the service


class Guardian:
    """The guardian's process, for the service that keeps its files in `folder` and is to write that ready file."""

    def __init__(self, folder: Path, ready_file: Path | None = None) -> None:
        self._folder = folder
        self._ready_file = "" if ready_file is None else str(ready_file.absolute())
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # In a session of its own: Ctrl-C and a service manager's signal to all are for those that it ends.
        command = [sys.executable, "-IS", __file__, str(self._folder), str(os.getpid()), self._ready_file]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def restart_if_ended(self) -> None:
        """Restart the process if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            self.start()

    def stop(self) -> None:
        """End the process, since the service has ended by itself."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            process.communicate(ENDED, timeout=2.0)
        process.kill()
        process.wait()


class ServiceProcesses:
    """Processes of the service with that folder, except this one and those that it has started."""

    def __init__(self, folder: str) -> None:
        self._mark = f"{MARK}={folder}\0".encode()
        self._descendants: dict[int, int] = {}  # when each began: its number may be another's later

    def remember(self, root: int) -> None:
        """Remember the processes below `root`, the service's first process, while it lives."""
        living = _processes()
        self._descendants = {
            pid: began for pid, began in self._descendants.items() if living.get(pid, (0, 0))[1] == began
        }
        self._descendants |= {pid: living[pid][1] for pid in _with_children(living, [root]) if pid != root}

    def living(self) -> list[int]:
        found = _processes()
        ours = [pid for pid in found if found[pid][1] == self._descendants.get(pid) or self._is_marked(pid)]
        return _with_children(found, ours)

    def _is_marked(self, pid: int) -> bool:
        with suppress(OSError):  # it ended meanwhile, or is another user's
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes()
        return False


def _processes() -> dict[int, tuple[int, int]]:
    """Return parent and start time of each process that has not ended, except this one."""
    return {pid: state for pid, state in _states() if pid != os.getpid()}


def _states() -> Iterator[tuple[int, tuple[int, int]]]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                yield int(process.name), (int(fields[1]), int(fields[19]))


def _with_children(living: dict[int, tuple[int, int]], roots: list[int]) -> list[int]:
    """Return these processes, and all below them."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in living.items():
        children.setdefault(parent, []).append(pid)
    found = dict.fromkeys(roots)
    todo = list(found)
    for pid in todo:
        new = [child for child in children.get(pid, []) if child not in found]
        found.update(dict.fromkeys(new))
        todo += new
    return todo


def end_all(folder: str, family: ServiceProcesses, seconds: float = END_S) -> None:
    deadline = time.monotonic() + seconds
    while (left := family.living()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def remove_ready_file(path: str, folder: str) -> None:
    """Remove the ready file, if it is that of the service with this folder; another's, or what is none, stays."""
    with suppress(OSError, ValueError, TypeError, KeyError):  # it is not there, or no service has written it
        if Path(json.loads(Path(path).read_text())["folder"]).parent == Path(folder):
            Path(path).unlink()


def main(folder: str, service: str, ready_file: str = "") -> None:
    family = ServiceProcesses(folder)
    family.remember(int(service))
    while not select.select([sys.stdin], [], [], _POLL_INTERVAL_S)[0]:
        family.remember(int(service))
    if sys.stdin.buffer.read() != ENDED:
        if ready_file:
            remove_ready_file(ready_file, folder)  # first, as nobody is to take what ends for what is ready
        end_all(folder, family)


if __name__ == "__main__":
    main(*sys.argv[1:])
