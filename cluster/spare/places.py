"""Which processes of a node wait for a replica, as files of Ray's session there: no process of it need ask another.

`wanted-*` is a place for one that is on its way. The first process that comes for one renames it to `spare-PID-BEGAN`,
and has it. `asked` is as many bytes long as others were asked for in a row, none of whom has stayed for long.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..processes import is_stopped

__all__ = ["Places"]

STALE_S = 20.0  # who has not come by then does not come: it was killed before that, or never started
_WANTED, _SPARE = "wanted-", "spare-"
_WAITING = b"ray::IDLE"  # the title of a worker of Ray's that nobody has taken
_STARTING = b"default_worker.py"  # before it has one


class Places:
    """Of one node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_node(cls, session: Path, node: str) -> Places:
        """Nodes that are on one machine can have one folder for their session."""
        return cls(session / "motley-spare" / node)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else counts and asks meanwhile."""
        import fcntl  # there is none on Windows, where the rest is imported too

        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def add(self, count: int) -> list[Path]:
        added = [self._folder / f"{_WANTED}{secrets.token_hex(8)}" for _ in range(count)]
        for wanted in added:
            wanted.touch(mode=0o600)
        return added

    def take(self) -> bool:
        """Whether there was one for this process."""
        for wanted in self._those(_WANTED):
            with suppress(FileNotFoundError):  # another process has it
                if _age_s(wanted) < STALE_S:
                    pid = os.getpid()
                    wanted.rename(self._folder / f"{_SPARE}{pid}-{_began(pid)}")
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
            pid, _, began = spare.name.removeprefix(_SPARE).partition("-")
            title = _title(int(pid), began)
            if title.startswith(_WAITING) or _STARTING in title:
                if not is_stopped(int(pid)):
                    expected += 1
                    continue
                os.kill(int(pid), signal.SIGKILL)  # the replica that got it would never begin
                title = b""
            if title:
                self.note_steady()  # it is taken, which is what it was for
            spare.unlink(missing_ok=True)
        return expected

    @property
    def asked(self) -> tuple[int, float]:
        """How often in a row, and how many seconds ago at last."""
        with suppress(FileNotFoundError):
            found = (self._folder / "asked").stat()
            return found.st_size, time.time() - found.st_mtime
        return 0, float("inf")

    def note_asked(self) -> None:
        with (self._folder / "asked").open("ab") as file:
            file.write(b".")

    def note_steady(self) -> None:
        """Those who were asked for have stayed until they were taken, or for long."""
        (self._folder / "asked").unlink(missing_ok=True)

    def _those(self, beginning: str) -> list[Path]:
        return sorted(self._folder.glob(f"{beginning}*"))


def _title(pid: int, began: str) -> bytes:
    """Nothing where it is dead, or another process has its number now."""
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        if _began(pid) == began:
            return title
    return b""


def _began(pid: int) -> str:
    """When that process was started, by the clock of the kernel's. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime
