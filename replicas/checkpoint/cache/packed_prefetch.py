"""Early digest of a file of repacked weights: the file is mapped and digested while Python still imports torch, on a
core that is idle until then.

The code that reads the file afterwards takes over the map, and digests the remaining pieces.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from ....kernels.cpu.memory.mapped_pages import populate_pages
from ...errors import CheckpointError
from ..files.safetensors_header import parse_header
from ..reading.weight_digests import digest_piece, tensor_pieces

_SWITCH_S = 0.0005  # Python's switch interval meanwhile: at the usual 5 ms importing would delay the digests


class PackedPrefetch:
    """A file that is being digested early. memory: map of the whole file, copied where it is written to. found: digests
    of pieces, by the offset where their data begin.
    """

    def __init__(self, path: Path) -> None:
        """Map a file and begin to digest it in a thread. Raises OSError, ValueError for an empty one."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._signature = _signature(self._descriptor)
            self.memory = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.found: dict[int, bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._digest, args=(path,), name="digests early", daemon=True)
        self._thread.start()

    def is_of(self, descriptor: int) -> bool:
        """Return whether the descriptor is of this same file, and the file has not changed since."""
        return self._signature == _signature(descriptor) == _signature(self._descriptor)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        """Stop and close the file. The map is freed with the last object that refers to it."""
        self.stop()
        os.close(self._descriptor)

    def _digest(self, path: Path) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            size = len(self.memory)
            with open(self._descriptor, "rb", closefd=False) as file:
                tensors, _ = parse_header(file, size, path.name)
            start = size - max(info.end for info in tensors.values())
            pieces = tensor_pieces({name: (path, info) for name, info in tensors.items()}, tensors)
            for piece in sorted(pieces, key=lambda piece: piece.begin):
                if self._stop.is_set():
                    return
                first, last = start + piece.begin, start + piece.end
                populate_pages(self.memory, first // mmap.PAGESIZE * mmap.PAGESIZE, last)  # else page faults read it
                with memoryview(self.memory)[first:last] as part:
                    self.found[piece.begin] = digest_piece(part)
        except (CheckpointError, OSError, ValueError):
            pass  # the later read of the file meets the same error and reports it
        finally:
            sys.setswitchinterval(interval)


_current: PackedPrefetch | None = None


def begin_packed_prefetch(path: Path) -> None:
    """Begin to map and digest a file of repacked weights that this start is likely to use."""
    global _current
    end_packed_prefetch()
    with suppress(OSError, ValueError):
        _current = PackedPrefetch(path)


def take_packed_prefetch(descriptor: int) -> PackedPrefetch | None:
    """Stop the early digest and return it, if it is of the descriptor's file; None otherwise."""
    early = _current
    if early is None:
        return None
    early.stop()
    return early if early.is_of(descriptor) else None


def end_packed_prefetch() -> None:
    """Drop the early digest of a file, since it will not be used any more."""
    global _current
    early, _current = _current, None
    if early is not None:
        early.close()


def _signature(descriptor: int) -> tuple[int, ...]:
    it = os.fstat(descriptor)
    return it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns
