"""A folder of this user's own, where what is kept from start to start lies."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["cache_home", "is_private", "private_folder"]


def cache_home() -> Path:
    """As the XDG specification has it. Raises RuntimeError where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base) if os.path.isabs(base) else Path.home() / ".cache"


def private_folder(path: Path) -> Path:
    """Made if it is missing. Raises OSError, PermissionError where others may write to it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(path.stat()):
        raise PermissionError(f"{path} belongs to another user, or others may write to it")
    return path


def is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
