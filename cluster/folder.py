"""The folder in which Ray keeps sockets and logs of one run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..replicas.errors import MotleyError
from .failures import ConfigurationError

MAX_PREFIX_CHARS = 40  # Unix socket paths end at 107 characters, and Ray's own part takes up to 60 of them


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A new folder of our own. Removed at the end; kept, and named in the error, when starting failed."""
    parent = tempfile.gettempdir()
    if len(parent) > MAX_PREFIX_CHARS and os.path.isdir("/tmp"):
        parent = "/tmp"
    private = Path(tempfile.mkdtemp(prefix="motley-", dir=parent))
    folder = private / "ray"  # Ray opens its own folder to everyone, and HAProxy's admin socket with it
    folder.mkdir()
    try:
        yield folder
    except MotleyError as error:
        if (folder / "session_latest").exists():
            logs = folder / "session_latest" / "logs"
            raise ConfigurationError(f"{error.message} (logs: {logs})", param=error.param, code=error.code) from error
        shutil.rmtree(private, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        raise
    shutil.rmtree(private, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Whoever waits for the file never sees half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
