"""Destinations and forms of Motley's own log lines in the processes of a service."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

FORMAT_VARIABLE = "MOTLEY_LOG_FORMAT"  # environment variable: a word of FORMATS; processes inherit it
TEXT, JSON = FORMATS = ("text", "json")
_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """Formatter of log records as one JSON object a line, with the traceback, if any, as `error`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def logs_are_json() -> bool:
    """Return whether this process writes its log lines as JSON."""
    return os.environ.get(FORMAT_VARIABLE, TEXT) == JSON


def log_to_stderr() -> None:
    """Send Motley's loggers to the process's own stderr at once, which Ray keeps in a file.

    Serve puts a log of its own in place of `sys.stderr`, and writes that only a thousand lines at a time.
    """
    log = logging.getLogger("motley")
    if not any(isinstance(handler, logging.StreamHandler) for handler in log.handlers):
        log.addHandler(_formatted(logging.StreamHandler(sys.__stderr__)))


def log_to_file(path: Path) -> None:
    """Append the lines of Motley's loggers to a file at once, those of level INFO too; stderr gets warnings and errors.

    Others may write to the same file, and put a new one in its place. It is opened by the first line.
    """
    log = logging.getLogger("motley")
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == str(path):
            return
        handler.setLevel(logging.WARNING)
    log.addHandler(_formatted(logging.handlers.WatchedFileHandler(path, delay=True)))
    log.setLevel(logging.INFO)


def _formatted(handler: logging.Handler) -> logging.Handler:
    handler.setFormatter(JsonFormatter() if logs_are_json() else logging.Formatter(_TEXT_FORMAT))
    return handler
