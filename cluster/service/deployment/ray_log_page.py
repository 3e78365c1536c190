"""Motley's log lines on the pages of Ray's dashboard."""

from __future__ import annotations

from ....replicas.host.process_logging import log_to_file, log_to_stderr
from ...ray_compat.serve_logs import serve_log_file


def log_to_ray_page() -> None:
    """Write this process's log lines to stderr, and to the file that the dashboard shows for a replica of Serve."""
    log_to_stderr()
    path = serve_log_file()
    if path is not None:
        log_to_file(path)
