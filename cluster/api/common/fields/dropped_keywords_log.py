"""Log of the parts of a schema that were left out because it is not `strict`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

log = logging.getLogger(__name__)

MAX_LISTED = 8  # keywords in one log line
MAX_REMEMBERED = 1024  # recent log lines that are not repeated


def log_dropped_keywords(schema: str, dropped: Sequence[str]) -> None:
    """Log one line, once for each schema, if anything of it was left out. Escapes unprintable characters: clients
    choose the names.
    """
    if not dropped:
        return
    listed = ", ".join(dropped[:MAX_LISTED]) + " …" * (len(dropped) > MAX_LISTED)
    line = f"{schema}: kept without {listed}; with strict it is refused"
    _log_once("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line))


@lru_cache(MAX_REMEMBERED)  # the same schemas come with every request of a client
def _log_once(line: str) -> None:
    log.warning("%s", line)
