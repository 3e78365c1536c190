"""Private folder of this user, for files that are kept from start to start."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_ABANDONED_S = 3600.0  # a partial file that is older was left by a process that has ended


def cache_home() -> Path:
    """Return the user's cache folder by the XDG specification. Raises RuntimeError if there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base) if os.path.isabs(base) else Path.home() / ".cache"


def make_private_folder(path: Path) -> Path:
    """Return the folder, made if it is missing. Raises OSError; PermissionError if others may write to it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(path.stat()):
        raise PermissionError(f"{path} belongs to another user, or others may write to it")
    return path


def is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextmanager
def write_atomically(path: Path, mode: str = "x") -> Iterator[IO[Any]]:
    """Open a new file for writing, that takes the path's place once it is complete: a reader always sees a whole file,
    and no other user may write to it. Raises OSError.

    If the block does not complete, the old file stays. mode: "x" for text, "x+b" for bytes.
    """
    make_private_folder(path.parent)
    part = path.with_name(f"{path.stem}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with open(part, mode, opener=_own) as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Delete partial files of processes that have ended."""
    for part in folder.glob("*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()


def _own(path: str, flags: int) -> int:
    """Open a file so that no other user can write to it, whatever the umask allows."""
    return os.open(path, flags, 0o600)
