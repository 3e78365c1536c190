"""Log files of Serve's processes, which Ray's dashboard shows on the page of each replica."""

from __future__ import annotations

import logging
from pathlib import Path


def serve_log_name() -> str:
    """Return the name of the logger by which Serve's processes write their log files."""
    from ray.serve._private.constants import SERVE_LOGGER_NAME

    return str(SERVE_LOGGER_NAME)


def serve_log_file() -> Path | None:
    """Return the file to which Serve writes the log of the replica in this process; None if there is no replica.

    Serve holds lines back there until it has a thousand of them.
    """
    for handler in logging.getLogger(serve_log_name()).handlers:
        target = getattr(handler, "target", handler)
        if isinstance(target, logging.FileHandler):
            return Path(target.baseFilename)
    return None
