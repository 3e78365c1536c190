"""Which processes of a node wait for a replica, as files of Ray's session there: no process of it need ask another.

`wanted-*` is a place for one that is on its way. The first process that comes renames it to `spare-<pid>`, and has it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Places"]

STALE_S = 60.0  # who has not come by then does not come
_WANTED, _SPARE = "wanted-", "spare-"
_WAITING = b"ray::IDLE"  # the title of a worker of Ray's that nobody has taken
_STARTING = b"default_worker.py"  # before it has one


class Places:
    """Of one node. raylet: the process that the node's workers are children of."""

    def __init__(self, folder: Path, raylet: int) -> None:
        self._folder, self._raylet = folder, raylet

    @classmethod
    def of_node(cls, session: Path, node: str, raylet: int) -> Places:
        """Nodes that are on one machine can have one folder for their session."""
        return cls(session / "motley-spare" / node, raylet)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else counts and asks meanwhile."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def add(self, count: int) -> None:
        for _ in range(count):
            (self._folder / f"{_WANTED}{secrets.token_hex(8)}").touch(mode=0o600)

    def take(self) -> bool:
        """Whether there was one for this process."""
        for wanted in self._those(_WANTED):
            with suppress(FileNotFoundError):  # another process has it
                if _age_s(wanted) < STALE_S:
                    wanted.rename(self._folder / f"{_SPARE}{os.getpid()}")
                    return True
        return False

    def count(self) -> int:
        """Processes that wait or are on their way. Files of others go."""
        expected = 0
        for wanted in self._those(_WANTED):
            with suppress(FileNotFoundError):  # it has come
                if _age_s(wanted) < STALE_S:
                    expected += 1
                else:
                    wanted.unlink()
        for spare in self._those(_SPARE):
            if self._waits(int(spare.name.removeprefix(_SPARE))):
                expected += 1
            else:
                spare.unlink(missing_ok=True)
        return expected

    def _those(self, beginning: str) -> list[Path]:
        return sorted(self._folder.glob(f"{beginning}*"))

    def _waits(self, pid: int) -> bool:
        """Not where it is taken or dead, or another process has its number now."""
        process = Path("/proc", str(pid))
        try:
            parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
            title = (process / "cmdline").read_bytes()
        except OSError:
            return False
        return parent == self._raylet and (title.startswith(_WAITING) or _STARTING in title)


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime
