"""Logs that outlive their service, in a folder that its owner has named."""

from __future__ import annotations

import os
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from ...service_errors import ConfigurationError


def check_log_folder(folder: Path) -> None:
    """Make the folder for kept logs if there is none. Raises ConfigurationError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "nothing may be written there"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise ConfigurationError(f"--keep-logs {folder}: {why}", param="keep_logs")


def keep_logs(logs: Path, folder: Path) -> Path:
    """Copy a run's logs to a new folder in `folder`, for its owner alone, and return it. Raises OSError.

    Its name begins with `motley-` and the time in UTC.
    """
    target = Path(tempfile.mkdtemp(prefix=f"motley-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-", dir=folder))
    # One folder deeper, as the copy takes the modes of what it copies, which others may read.
    return Path(shutil.copytree(logs.resolve(), target / "logs", symlinks=True))
