"""Destination of Motley's own warnings in Serve's processes."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr() -> None:
    """Send Motley's loggers to the process's own stderr at once, which Ray keeps in a file.

    Serve puts a log of its own in place of `sys.stderr`, and writes that only a thousand lines at a time.
    """
    log = logging.getLogger("motley")
    if not any(isinstance(handler, logging.StreamHandler) for handler in log.handlers):
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(logging.Formatter(FORMAT))
        log.addHandler(handler)
