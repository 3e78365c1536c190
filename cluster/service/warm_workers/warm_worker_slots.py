"""Records of a node's processes that wait for a replica: files in Ray's session there, so that no process asks another.

`wanted-*` is a place for a process that is about to come. The first process that claims it renames it to
`spare-PID-BEGAN`. The size of `asked` in bytes is the number of requests in a row whose processes did not stay long.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...process_tree import is_stopped
from ...ray_compat.visible_names import STARTING_WORKER, WAITING_WORKER

STALE_S = 20.0  # a process that has not come by then was killed before, or never started
_REQUESTED, _STARTED = "wanted-", "spare-"
_WAITING, _STARTING = WAITING_WORKER.encode(), STARTING_WORKER.encode()


class WarmWorkerSlots:
    """Files that record the warm worker processes of one node.

    Places are counted and added under a lock, see `alone`; a process takes one without, by renaming its file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_node(cls, session: Path, node: str) -> WarmWorkerSlots:
        """Return the records of a node, in a folder of its own: nodes on one machine can share a session folder."""
        return cls(session / "motley-spare" / node)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock of the records, so that no other process counts or requests meanwhile."""
        import fcntl  # does not exist on Windows, where this module is imported too

        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def add(self, count: int) -> list[Path]:
        added = [self._folder / f"{_REQUESTED}{secrets.token_hex(8)}" for _ in range(count)]
        for requested in added:
            requested.touch(mode=0o600)
        return added

    def take(self) -> bool:
        """Claim a place for this process; return whether there was one."""
        for requested in self._those(_REQUESTED):
            with suppress(FileNotFoundError):  # another process has claimed it
                if _age_s(requested) < STALE_S:
                    pid = os.getpid()
                    requested.rename(self._folder / f"{_STARTED}{pid}-{_began(pid)}")
                    return True
        return False

    def count(self) -> int:
        """Return the number of processes that wait or are about to come; delete the records of others."""
        expected = 0
        for requested in self._those(_REQUESTED):
            with suppress(FileNotFoundError):  # the process has come
                if _age_s(requested) < STALE_S:
                    expected += 1
                else:
                    requested.unlink()
        for started in self._those(_STARTED):
            pid, _, began = started.name.removeprefix(_STARTED).partition("-")
            title = _title(int(pid), began)
            if title.startswith(_WAITING) or _STARTING in title:
                if not is_stopped(int(pid)):
                    expected += 1
                    continue
                os.kill(int(pid), signal.SIGKILL)  # a replica in this stopped process would never begin
                title = b""
            if title:
                self.note_steady()  # a replica has taken it, as intended
            started.unlink(missing_ok=True)
        return expected

    @property
    def requests(self) -> tuple[int, float]:
        """Number of requests in a row whose processes did not stay, and seconds since the last one."""
        with suppress(FileNotFoundError):
            found = (self._folder / "asked").stat()
            return found.st_size, time.time() - found.st_mtime
        return 0, float("inf")

    def note_request(self) -> None:
        with (self._folder / "asked").open("ab") as file:
            file.write(b".")

    def note_steady(self) -> None:
        """Record that the requested processes stayed until they were taken, or for long."""
        (self._folder / "asked").unlink(missing_ok=True)

    def _those(self, beginning: str) -> list[Path]:
        return sorted(self._folder.glob(f"{beginning}*"))


def _title(pid: int, began: str) -> bytes:
    """Return a process's command line; empty if it is dead, or its number belongs to another process now."""
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        if _began(pid) == began:
            return title
    return b""


def _began(pid: int) -> str:
    """Return a process's start time in the kernel's clock ticks, as text. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime
