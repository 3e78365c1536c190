"""Folder in which Ray keeps sockets and logs of one run."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ....replicas.errors import MotleyError
from ...ray_compat.visible_names import logs_folder, session_folder
from ...service_errors import ConfigurationError
from .kept_logs import keep_logs
from .watchdog import ServiceLost

# Unix socket paths end at 107 characters. Ray and HAProxy put up to 84 behind the folder's name.
MAX_PATH_CHARS = 23
MAX_FAILED_RUNS = 5  # folders with logs of failures: a service that fails over and over must not fill the disk
_TRIES, _RETRY_DELAY_S = 20, 0.1  # to remove it
_LOCK = "lock"  # the name of a file in the folder of a service that runs, or was killed
_FAILED = "kept"  # the same file of a service that has failed, as of when
_held: list[int] = []  # descriptors of locks, which are let go of with the process


@contextmanager
def ray_folder(keep_in: Path | None = None) -> Iterator[Path]:
    """Yield a new folder of our own. Removed at the end; kept, and named in the error, if a start fails or a part is
    lost.

    keep_in  folder to which the logs are copied at the end of a run that did not fail; None: none are

    Folders of services that were killed are removed first. Of those that were kept, the newest MAX_KEPT stay.
    """
    sweep_killed()
    private = _private()
    lock = _locked(private)
    folder = private / "ray"  # Ray opens its own folder to everyone, and HAProxy's admin socket with it
    folder.mkdir()
    try:
        yield folder
    except MotleyError as error:
        if logs := _failed_logs(folder, lock):
            raise ConfigurationError(f"{error.message} (logs: {logs})", param=error.param, code=error.code) from error
        _remove(private)
        raise
    except ServiceLost as lost:
        if logs := _failed_logs(folder, lock):
            raise ServiceLost(f"{lost} (logs: {logs})") from lost
        _remove(private)
        raise
    except BaseException:
        _end(private, folder, lock, keep_in)
        raise
    _end(private, folder, lock, keep_in)


def _end(private: Path, folder: Path, lock: Path, keep_in: Path | None) -> None:
    """Remove the folder of a run that ended well, once its logs are where somebody wants them."""
    if keep_in is not None and logs_folder(folder).exists():
        try:
            print(f"logs: {keep_logs(logs_folder(folder), keep_in)}", flush=True)
        except OSError as error:
            why = error.strerror or error
            print(f"motley serve: the logs stay in {_failed_logs(folder, lock)}: {keep_in}: {why}", file=sys.stderr)
            return
    _remove(private)


def _failed_logs(folder: Path, lock: Path) -> Path | None:
    """Keep the folder and return the path of its logs, for somebody to read; None if there are none yet.

    No start removes them; only MAX_KEPT later failures do.
    """
    if not session_folder(folder).exists():
        return None
    with suppress(FileNotFoundError):  # somebody has removed it, and may have the folder for ever
        os.utime(lock)
        lock.rename(lock.with_name(_FAILED))
    for mark in sorted(_own(_FAILED), key=_modified)[:-MAX_FAILED_RUNS]:
        _remove_ended(mark)
    return logs_folder(folder)


def sweep_killed() -> None:
    """Remove this user's folders whose lock is no longer held, and of which no process is left."""
    for mark in _own(_LOCK):
        _remove_ended(mark)


def _own(name: str) -> list[Path]:
    """Return the files of that name in this user's folders of services, ended or not."""
    return [
        path
        for parent in _parents()
        for path in parent.glob(f"motley-[0-9]*/{name}")
        if _is_own(path, stat.S_ISREG) and _is_own(path.parent, stat.S_ISDIR)
    ]


def _is_own(path: Path, of_kind: Callable[[int], bool]) -> bool:
    with suppress(OSError):  # it goes this moment
        found = path.lstat()
        return of_kind(found.st_mode) and found.st_uid == os.geteuid()
    return False


def _modified(path: Path) -> float:
    with suppress(OSError):  # it goes this moment
        return path.lstat().st_mtime
    return 0.0


def _remove_ended(mark: Path) -> None:
    """Remove the folder of that file, unless a process holds the file locked or was started with the folder's path."""
    with suppress(OSError):  # it is locked, or goes this moment
        descriptor = os.open(mark, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _in_use(mark.parent):
                shutil.rmtree(mark.parent, ignore_errors=True)
        finally:
            os.close(descriptor)


def is_held(private: Path) -> bool:
    """Return whether the service with this folder lives, in whatever container. One of another user's counts as living,
    as nobody can tell.
    """
    try:
        descriptor = os.open(private / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return isinstance(error, PermissionError)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _in_use(folder: Path) -> bool:
    """Return whether a process was started with the folder's path, as Ray's and HAProxy's are: some outlive a
    killed service.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if os.fsencode(folder) + b"/" in (process / "cmdline").read_bytes():
                return True
    return False


def _locked(private: Path) -> Path:
    """Create a locked file that shows, in any container, that this process lives."""
    path, part = private / _LOCK, private / f"{_LOCK}.part"
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    part.rename(path)  # nobody sees it without the lock
    _held.append(descriptor)
    return path


def _remove(folder: Path) -> None:
    """Remove a folder, with retries: a daemon that is ending may still write there."""
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_RETRY_DELAY_S)


def _parents() -> list[Path]:
    """Return the folders that hold those of services: the one for temporary files, and /tmp for its short name."""
    chosen, short = Path(tempfile.gettempdir()), Path("/tmp")
    return [chosen, short] if short.is_dir() and chosen != short else [chosen]


def _private() -> Path:
    """Create a folder of this process, open to nobody else, with a path short enough for sockets."""
    name = f"motley-{os.getpid()}"
    parents = _parents()
    parent = next((each for each in parents if len(str(each / name / "ray")) <= MAX_PATH_CHARS), parents[-1])
    others = (f".{number}" for number in itertools.count(1))  # those before were kept by a failure long ago
    for suffix in itertools.chain(("",), others):
        with suppress(FileExistsError):
            folder = parent / (name + suffix)
            folder.mkdir(mode=0o700)
            return folder
    raise AssertionError("unreachable: ever higher numbers are tried until a folder's name is free")
