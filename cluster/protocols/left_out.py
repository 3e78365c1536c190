"""Tells the log what of a schema that is not `strict` was left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

log = logging.getLogger(__name__)

MAX_TOLD = 8  # keywords in one line of the log
MAX_REMEMBERED = 1024  # lines that are not written again


def tell_left_out(schema: str, dropped: Sequence[str]) -> None:
    """Writes one line, and that once, if anything of the schema was left out. The places hold a client's own names."""
    if not dropped:
        return
    listed = ", ".join(dropped[:MAX_TOLD]) + " …" * (len(dropped) > MAX_TOLD)
    line = f"{schema}: kept without {listed}; with strict it is refused"
    _tell("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line))


@lru_cache(MAX_REMEMBERED)  # the same schemas come with every request of a client
def _tell(line: str) -> None:
    log.warning("%s", line)
