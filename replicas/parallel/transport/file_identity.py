"""Identity of files across processes, which tells whether two processes read the same files: a path alone does not."""

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

from ...checkpoint.cache.weights_cache import file_signatures

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def local_files_identity(files: Iterable[Path]) -> str:
    """Return a digest that is equal in processes that read the same files under the same names."""
    return _machine_digest(file_signatures(files))


def local_temp_identity() -> str:
    """Return a digest that is equal in processes which can open each other's temporary files; empty if there is no
    folder.
    """
    try:
        found = os.stat(tempfile.gettempdir())
    except OSError:
        return ""
    return _machine_digest([tempfile.gettempdir(), found.st_dev, found.st_ino, os.geteuid()])


def _machine_digest(what: Any) -> str:
    """Return a SHA-256 of `what` and this machine's name and boot, since other machines may number disks and files
    alike.
    """
    boot = ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    return hashlib.sha256(json.dumps([socket.gethostname(), boot, what]).encode()).hexdigest()
