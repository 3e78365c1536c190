"""The folder in which Ray keeps sockets and logs of one run."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..replicas.errors import MotleyError
from .failures import ConfigurationError

# Unix socket paths end at 107 characters. Ray and HAProxy put up to 84 behind the folder's name.
MAX_PATH_CHARS = 23
_TRIES, _AGAIN_S = 20, 0.1  # to remove it


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A new folder of our own. Removed at the end; kept, and named in the error, when starting failed."""
    private = _private()
    folder = private / "ray"  # Ray opens its own folder to everyone, and HAProxy's admin socket with it
    folder.mkdir()
    try:
        yield folder
    except MotleyError as error:
        if (folder / "session_latest").exists():
            logs = folder / "session_latest" / "logs"
            raise ConfigurationError(f"{error.message} (logs: {logs})", param=error.param, code=error.code) from error
        _remove(private)
        raise
    except BaseException:
        _remove(private)
        raise
    _remove(private)


def _remove(folder: Path) -> None:
    """A daemon that ends meanwhile may still write there."""
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_AGAIN_S)


def _private() -> Path:
    """A folder of this process, open to nobody else, with a path short enough for sockets."""
    name = f"motley-{os.getpid()}"
    parent = Path(tempfile.gettempdir())
    if len(str(parent / name / "ray")) > MAX_PATH_CHARS and Path("/tmp").is_dir():
        parent = Path("/tmp")
    others = (f".{number}" for number in itertools.count(1))  # those before were kept by a failure long ago
    for suffix in itertools.chain(("",), others):
        with suppress(FileExistsError):
            folder = parent / (name + suffix)
            folder.mkdir(mode=0o700)
            return folder
    raise AssertionError("numbers do not end")


def write_whole(path: Path, text: str) -> None:
    """Whoever waits for the file never sees half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
