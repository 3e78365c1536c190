"""How far a model is loaded: lines in the log, and from each process that loads to the one that shows it a file."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

SUFFIX = ".loading"
PERIOD_S = 0.1
SAID_S = 2.0  # between lines in the log


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


class Said:
    """Called likewise, and hands it on; says it in the log with the rate since it said so last."""

    def __init__(
        self, progress: Callable[[int, int], None] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress, self._clock = progress, clock
        self._done, self._at = 0, clock()

    def __call__(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)
        now = self._clock()
        if done < self._done:  # from the start again
            self._done, self._at = done, now
        if done < total and now - self._at >= SAID_S:
            rate = (done - self._done) / (now - self._at) / 1e9
            log.info("weights: %.2f of %.2f GB, at %.2f GB/s", done / 1e9, total / 1e9, rate)
            self._done, self._at = done, now


def read_loading(folder: Path) -> tuple[int, int]:
    """Bytes loaded and bytes in all, of every process that has said something; (0, 0) if none has."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"*{SUFFIX}")]
    return sum(done for done, _ in found), sum(total for _, total in found)
