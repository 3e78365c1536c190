"""The folder in which Ray keeps sockets and logs of one run."""

from __future__ import annotations

import fcntl
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
from .watch import Lost

# Unix socket paths end at 107 characters. Ray and HAProxy put up to 84 behind the folder's name.
MAX_PATH_CHARS = 23
_TRIES, _AGAIN_S = 20, 0.1  # to remove it
_LOCK = "lock"
_held: list[int] = []  # descriptors of locks, which are let go of with the process


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A new folder of our own. Removed at the end; kept, and named in the error, when a start fails or a part is lost.

    Those of services that were killed are removed first.
    """
    sweep_killed()
    private = _private()
    lock = _locked(private)
    folder = private / "ray"  # Ray opens its own folder to everyone, and HAProxy's admin socket with it
    folder.mkdir()
    try:
        yield folder
    except MotleyError as error:
        if logs := _kept_logs(folder, lock):
            raise ConfigurationError(f"{error.message} (logs: {logs})", param=error.param, code=error.code) from error
        _remove(private)
        raise
    except Lost as lost:
        if logs := _kept_logs(folder, lock):
            raise Lost(f"{lost} (logs: {logs})") from lost
        _remove(private)
        raise
    except BaseException:
        _remove(private)
        raise
    _remove(private)


def _kept_logs(folder: Path, lock: Path) -> Path | None:
    """Where the logs are that somebody is to read: no start removes them. None: there are none yet."""
    if not (folder / "session_latest").exists():
        return None
    lock.unlink(missing_ok=True)
    return folder / "session_latest" / "logs"


def sweep_killed() -> None:
    """Remove this user's folders whose service holds their lock no more, and of which no process is left."""
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for path in parent.glob(f"motley-[0-9]*/{_LOCK}"):
            with suppress(OSError):  # somebody else's, or locked, or it goes this moment
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(descriptor).st_uid == os.geteuid() and not _in_use(path.parent):
                        shutil.rmtree(path.parent, ignore_errors=True)
                finally:
                    os.close(descriptor)


def _in_use(folder: Path) -> bool:
    """Whether a process was started with its path, as Ray's and HAProxy's are: some outlive a killed service."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            if os.fsencode(folder) + b"/" in command.read_bytes():
                return True
    return False


def _locked(private: Path) -> Path:
    """A file there that says, for as long as this process lives, that it does, in whatever container one looks."""
    path, part = private / _LOCK, private / f"{_LOCK}.part"
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    part.rename(path)  # nobody sees it without the lock
    _held.append(descriptor)
    return path


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
