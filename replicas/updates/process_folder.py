"""A temporary folder of one process alone.

Folders that killed processes have left are removed by the next process that makes one, and by a service when it starts
and when it has ended, since its replicas are ended by killing them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX, _LOCK = "motley-weights-", "lock"
_held: dict[Path, int] = {}  # descriptors of locks, which end with the process


def create_process_folder() -> Path:
    """Make a new folder and lock it, after removing those that killed processes have left. Raises OSError."""
    remove_stale_folders()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_at(lock, folder / _LOCK):
            _held[folder] = lock
            return folder
        os.close(lock)  # another process took the lock first and has removed the folder as one that was left


def latest_process_folder(folders: list[Path]) -> Path:
    """Return the last of this process's folders, or a new one, which is added, where that has been deleted. Raises
    OSError.
    """
    if not folders or not process_folder_exists(folders[-1]):
        folders.append(create_process_folder())
    return folders[-1]


def process_folder_exists(folder: Path) -> bool:
    """Return whether a folder is still the one that was made here, since other programs may clear temporary folders."""
    return folder in _held and _is_at(_held[folder], folder / _LOCK)


def release_process_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _held.pop(folder, None)) is not None:
        os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at that path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def remove_stale_folders() -> None:
    """Remove folders whose lock no process holds; a folder without a lock is just being made."""
    for found in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            lock = os.open(found, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it is another user's, or gone
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(found.parent, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)
