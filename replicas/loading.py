"""How far a model is loaded, from the process that loads it to the one that shows it: a small file for each."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

SUFFIX = ".loading"
PERIOD_S = 0.1


class LoadingFile:
    """Called with (bytes loaded, bytes in all); writes them to a file of this process's own, not too often."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}{SUFFIX}"
        self._written = 0.0  # monotonic

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._written < PERIOD_S:
            return
        self._written = now
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps([done, total]))
        part.replace(self._path)  # whoever reads it never sees half of it


def read_loading(folder: Path) -> tuple[int, int]:
    """Bytes loaded and bytes in all, of every process that has said something; (0, 0) if none has."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"*{SUFFIX}")]
    return sum(done for done, _ in found), sum(total for _, total in found)
