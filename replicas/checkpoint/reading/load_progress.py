"""Progress of loading a model: lines in the log, and a file from each loading process to the one that shows it."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

SUFFIX = ".loading"
WRITE_PERIOD_S = 0.1
LOG_PERIOD_S = 2.0  # seconds between two lines in the log


class LoadProgressFile:
    """Progress callback that writes (bytes loaded, total bytes) to a file of this process's own, not too often."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}{SUFFIX}"
        self._written = 0.0  # monotonic

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._written < WRITE_PERIOD_S:
            return
        self._written = now
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps([done, total]))
        part.replace(self._path)  # a reader never sees half of it


class LoadProgressLog:
    """Progress callback that passes its arguments on, and logs them with the rate since its last line."""

    def __init__(
        self, progress: Callable[[int, int], None] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress, self._clock = progress, clock
        self._done, self._at = 0, clock()

    def __call__(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)
        now = self._clock()
        if done < self._done:  # loading began again from the start
            self._done, self._at = done, now
        if done < total and now - self._at >= LOG_PERIOD_S:
            rate = (done - self._done) / (now - self._at) / 1e9
            log.info("weights: %.2f of %.2f GB, at %.2f GB/s", done / 1e9, total / 1e9, rate)
            self._done, self._at = done, now


def read_load_progress(folder: Path) -> tuple[int, int]:
    """Return bytes loaded and total bytes, summed over every process that has written its progress; (0, 0) if none
    has.
    """
    found = [json.loads(path.read_text()) for path in folder.glob(f"*{SUFFIX}")]
    return sum(done for done, _ in found), sum(total for _, total in found)
