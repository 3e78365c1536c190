"""Which processes have the same files before them: a path alone does not tell."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..weights_cache import signature_of

__all__ = ["files_here", "temporary_here"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def files_here(files: Iterable[Path]) -> str:
    """Equal in processes that read the same files, and have them by the same names."""
    return _told(signature_of(files))


def temporary_here() -> str:
    """Equal in processes of one user that have the same folder of temporary files; empty: there is none."""
    try:
        found = os.stat(tempfile.gettempdir())
    except OSError:
        return ""
    return _told([tempfile.gettempdir(), found.st_dev, found.st_ino, os.geteuid()])


def _told(what: Any) -> str:
    """Of this machine alone: others number their disks and files alike."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    return hashlib.sha256(json.dumps([socket.gethostname(), boot, what]).encode()).hexdigest()
