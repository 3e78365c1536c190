"""Folder of a checkpoint, and the one way to open the files within it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ...errors import CheckpointError

GIT_LFS = b"version https://git-lfs."  # beginning of a pointer, which Git LFS leaves in place of a file
_MAX_POINTER_BYTES = 1024


def has_entry(folder: Path, name: str) -> bool:
    """Return whether the folder has an entry of this name, even one that cannot be opened: opening it then says why."""
    return os.path.lexists(folder / name)


@contextmanager
def open_checkpoint_file(folder: Path, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file of the folder, and give its size in bytes. Every file of a checkpoint is opened here.

    Raises CheckpointError naming the file: for a link out of the folder, for a pipe or a device, which might be waited
    for or read for ever, for a pointer of Git LFS, and for whatever cannot be opened or read.
    """
    path = resolve_within(folder.resolve(), name)
    try:
        # Opened without waiting, since the other end of a pipe may never be opened.
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError("is no regular file", file=name)
            if found.st_size < _MAX_POINTER_BYTES and file.read(len(GIT_LFS)) == GIT_LFS:
                raise pointer_error(name)
            file.seek(0)
            yield file, found.st_size
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=name) from error


def pointer_error(name: str) -> CheckpointError:
    """Return the error for a pointer of Git LFS that is in place of the file."""
    return CheckpointError("is a pointer of Git LFS and not the file; fetch that with `git lfs pull`", file=name)


def read_checkpoint_file(folder: Path, name: str, limit: int) -> bytes:
    """Return the contents of a file of at most `limit` bytes. Raises CheckpointError."""
    with open_checkpoint_file(folder, name) as (file, size):
        data = file.read(limit + 1)
    if max(size, len(data)) > limit:
        raise CheckpointError(f"larger than {limit} bytes", file=name)
    return data


def resolve_within(folder: Path, name: str) -> Path:
    """Return folder / name. Raises CheckpointError if that is a link out of the (resolved) folder.

    The Hugging Face cache keeps a snapshot as links into its own blobs:
    CACHE/models--X--Y/snapshots/REVISION/name -> CACHE/models--X--Y/blobs/… (-> CACHE/blobs/…).
    """
    path = folder / name
    roots = [folder]
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        repository = folder.parent.parent
        roots += [repository / "blobs", repository.parent / "blobs"]
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # a circle of links
        raise CheckpointError("is a symbolic link that leads back to itself", file=name) from error
    if not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError("is a link that leaves the checkpoint's folder", file=name)
    return path


def regular_file_size(path: Path) -> int:
    """Return the bytes of a regular file; opening a pipe or a device might wait for ever. Raises OSError,
    CheckpointError.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError("is no regular file", file=path.name)
    return found.st_size
