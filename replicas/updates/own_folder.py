"""A folder of this process alone.

What one that was killed has left is removed by the next that wants such a folder, and by a service when it starts and
when it has ended: its replicas end by being killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["current_folder", "give_up", "is_there", "own_folder", "sweep"]

_PREFIX, _LOCK = "motley-weights-", "lock"
_held: dict[Path, int] = {}  # descriptors of locks: they are let go of with the process


def own_folder() -> Path:
    """Raises OSError."""
    sweep()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_at(lock, folder / _LOCK):
            _held[folder] = lock
            return folder
        os.close(lock)  # another process took the lock before this one did, and the folder for one that was left


def current_folder(folders: list[Path]) -> Path:
    """The last of these, which are this process's; one more where that has gone. Raises OSError."""
    if not folders or not is_there(folders[-1]):
        folders.append(own_folder())
    return folders[-1]


def is_there(folder: Path) -> bool:
    """Whether it is what was made here still: others clear temporary folders too."""
    return folder in _held and _is_at(_held[folder], folder / _LOCK)


def give_up(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _held.pop(folder, None)) is not None:
        os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether that file has that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def sweep() -> None:
    """Remove folders whose lock nobody holds; one without a lock is being made."""
    for found in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            lock = os.open(found, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # somebody else's, or gone
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(found.parent, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)
