"""Log of the parts of a schema that were left out because it is not `strict`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

log = logging.getLogger(__name__)

MAX_TOLD = 8  # keywords in one log line
MAX_REMEMBERED = 1024  # recent log lines that are not repeated


def tell_left_out(schema: str, dropped: Sequence[str]) -> None:
    """Log one line, once for each schema, if anything of it was left out. Escapes unprintable characters: clients
    choose the names.
    """
    if not dropped:
        return
    listed = ", ".join(dropped[:MAX_TOLD]) + " …" * (len(dropped) > MAX_TOLD)
    line = f"{schema}: kept without {listed}; with strict it is refused"
    _tell("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line))


@lru_cache(MAX_REMEMBERED)  # the same schemas come with every request of a client
def _tell(line: str) -> None:
    log.warning("%s", line)
