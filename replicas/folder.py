"""A checkpoint's folder, and what lies within it."""

from __future__ import annotations

import stat
from pathlib import Path

from .errors import CheckpointError


def contained(folder: Path, name: str) -> Path:
    """folder / name, unless it is a link out of the (resolved) folder; then CheckpointError.

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
        raise CheckpointError("is a link that leads nowhere", file=name) from error
    if not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError("is a link that leaves the checkpoint's folder", file=name)
    return path


def regular_size(path: Path) -> int:
    """Bytes of a file that is a file: to open a pipe or a device might wait for ever. Raises OSError."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError("is no regular file", file=path.name)
    return found.st_size
