"""Cache of repacked weights, kept from start to start: a folder of files that are checked before they are used.

    known/KEY.json                 digests of a checkpoint's files, by their inode, size, mtime and ctime: as long as
                                   these are the same, the files need not be read
    weights/KIND-KEY.safetensors   repacked weights, by the contents of the checkpoint, the code and the processor that
                                   repacked it; the kind is all of that but the contents

    hints/…                        which entry a folder used last: startup_prefetch.py reads it from disk early
    rates/…                        rates of engines: cached_rates.py

A key consists of lines, the first of which is the kind.

Whatever is wrong with an entry, the model is then loaded from the checkpoint. All of it may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from ...host.private_folder import is_private, make_private_folder, remove_abandoned, write_atomically
from .packed_weights import (
    PackedWeights,
    PackedWeightsError,
    PackedWeightsIndex,
    read_packed_index,
    read_packed_weights,
    write_packed_weights,
)
from .startup_prefetch import hint_path, weights_cache_folder

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 2
WRITER = "weights cache"  # name of the thread that writes
MIN_CACHED_BYTES = 64 << 20  # a model that is smaller is repacked in no time
MAX_CACHE_BYTES = 64 << 30  # most bytes of all files; those that were not used for longest are deleted first
FREE_SHARE = 0.1  # share of the disk that is left free
RACY_S = 2.0  # a file that changed so lately may change again within the resolution of its times
READY_S = 5.0  # seconds that an engine needs to become ready after loading; the cache is written after that
_POLL_S, _NICE = 0.1, 10


def open_weights_cache(setting: str | None) -> WeightsCache | None:
    """Open the cache. setting: a folder; "off": none; None: the user's own. Returns None, and logs why, if it cannot be
    used.
    """
    if setting == "off":
        return None
    try:
        return WeightsCache(make_private_folder(weights_cache_folder(setting)))
    except (OSError, RuntimeError) as error:
        log.warning("weights cache: it is not used: %s", error)
        return None


class WeightsCache:
    """Cache of repacked weights in a folder that only this user can write to."""

    def __init__(self, folder: Path, *, min_bytes: int = MIN_CACHED_BYTES) -> None:
        """Use a folder as the cache of repacked weights. min_bytes: smaller models are not kept."""
        self.folder, self.min_bytes = folder, min_bytes
        self._writer: threading.Thread | None = None
        self._awaited = threading.Event()
        self._claim: int | None = None  # descriptor of a locked file

    def find_digests(self, files: Iterable[Path]) -> bytes | None:
        """Return the digests of a checkpoint's tensors that were recorded before, if none of its files has changed
        since; else None.
        """
        try:
            signature = file_signatures(files)
            said = json.loads(_digests_path(self.folder, signature).read_text())
            if said["files"] == signature and said["sum"] == _record_digest(signature, said["contents"]):
                return bytes.fromhex(said["contents"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning(
                "weights cache: the recorded digests of a checkpoint cannot be read and are not used: %s", error
            )
        return None

    def remember(self, before: list[list[Any]], files: Iterable[Path], weight_digests: bytes) -> None:
        """Record the digests of files that had the signature `before`, unless they changed since, or just before."""
        try:
            signature = file_signatures(files)
        except OSError:  # one has gone
            return
        latest = max(max(each[-2:]) for each in signature) / 1e9
        if signature != before or time.time() - latest < RACY_S:
            return
        said = {
            "files": signature,
            "contents": weight_digests.hex(),
            "sum": _record_digest(signature, weight_digests.hex()),
        }
        path = _digests_path(self.folder, signature)
        with _LogCacheErrors("the digests of a checkpoint are not kept"), write_atomically(path) as file:
            file.write(json.dumps(said))

    def has(self, kind: str) -> bool:
        """Return whether the cache has an entry of repacked weights of that kind, of whatever contents."""
        return any((self.folder / "weights").glob(f"{_short_digest(kind)}-*.safetensors"))

    def hint(self, checkpoint: Path, key: str, device: str = "cpu") -> None:
        """Record that the next start from that folder, on such a device, is likely to use this entry."""
        path, name = hint_path(self.folder, checkpoint, device), _entry_path(self.folder, key).name
        with _LogCacheErrors("the hint for the next start is not kept"):
            if path.is_file() and path.read_text() == name:
                return
            with write_atomically(path) as file:
                file.write(name)

    def find(self, key: str) -> PackedWeights | None:
        """Return the weights that were kept for that key. An entry that is damaged is logged and removed."""
        return self._checked(key, lambda descriptor: read_packed_weights(descriptor, key))

    def open(self, key: str) -> tuple[int, PackedWeightsIndex] | None:
        """Return a descriptor, which the caller must close, and the index of the entry, with no tensor in memory; None
        if there is none. A damaged entry is logged and removed.
        """

        def opened(descriptor: int) -> tuple[int, PackedWeightsIndex]:
            index = read_packed_index(descriptor, key)
            return os.dup(descriptor), index

        return self._checked(key, opened)

    def _checked(self, key: str, read: Callable[[int], T]) -> T | None:
        path = _entry_path(self.folder, key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("weights cache: %s cannot be opened: %s", path.name, error.strerror)
            return None
        try:
            if not is_private(os.fstat(descriptor)):
                raise PackedWeightsError("it belongs to another user, or others may write to it")
            found = read(descriptor)
            with suppress(OSError):
                os.utime(path)  # marks it as used last, so that it is deleted last
            return found
        except (PackedWeightsError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("weights cache: %s is deleted, and its weights are made anew: %s", path.name, error)
            with suppress(OSError):
                path.unlink()
            return None
        finally:
            os.close(descriptor)

    def claim(self, kind: str) -> bool:
        """Try to become the one process that keeps an entry of that kind, until it is written or `give_up` is called.
        Returns False if another process is.
        """
        with _LogCacheErrors("the lock for writing repacked weights cannot be taken"):
            folder = make_private_folder(self.folder / "weights")
            descriptor = os.open(folder / f"{_short_digest(kind)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._claim = descriptor
        return self._claim is not None

    def give_up(self) -> None:
        """Give up the claim to write an entry, if this process has one."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def keep(self, key: str, weights: PackedWeights) -> None:
        """Write an entry in a thread, once the engine is likely ready; a process that ends waits for it.

        `weights` must not change.
        """
        self._writer = threading.Thread(target=self._write_later, args=(key, weights), name=WRITER)
        self._writer.start()

    def wait(self) -> None:
        """Wait until the entry that is being kept is written."""
        self._awaited.set()
        if self._writer is not None:
            self._writer.join()

    def fill(self, key: str, nbytes: int, write: Callable[[BinaryIO], None], *, max_bytes: int | None = None) -> bool:
        """Write an entry of about `nbytes` bytes at once, in the caller's thread. Returns whether there was enough
        space. Raises what `write` raises.

        max_bytes  most bytes of all files; None: MAX_CACHE_BYTES
        """
        path = _entry_path(self.folder, key)
        make_private_folder(path.parent)
        if not self._evict(path.parent, nbytes, MAX_CACHE_BYTES if max_bytes is None else max_bytes):
            return False
        with write_atomically(path, "x+b") as file:
            write(cast(BinaryIO, file))
        return True

    def unnamed(self, nbytes: int) -> BinaryIO | None:
        """Return a file on the same disk that is deleted once it is closed; None if there is not enough space. Raises
        OSError.
        """
        return cast(BinaryIO, tempfile.TemporaryFile(dir=self.folder)) if _fits(self.folder, nbytes) else None

    def _write_later(self, key: str, weights: PackedWeights) -> None:
        """Write an entry with low priority, after other work on this machine."""
        until, main = time.monotonic() + READY_S, threading.main_thread()
        while not self._awaited.wait(_POLL_S) and main.is_alive() and time.monotonic() < until:
            pass
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # applies to this thread alone, on Linux
        self._write(key, weights)

    def _write(self, key: str, weights: PackedWeights) -> None:
        with _LogCacheErrors("repacked weights are not kept"):
            nbytes = packed_bytes(weights)
            if not self.fill(key, nbytes, lambda file: write_packed_weights(file, key, weights)):
                log.warning("weights cache: repacked weights are not kept: there is no space for %d MiB", nbytes >> 20)
        self.give_up()

    def _evict(self, folder: Path, nbytes: int, max_bytes: int) -> bool:
        """Delete the entries that were not used for longest until there is enough space; return whether there is."""
        remove_abandoned(folder)
        found = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in found)
        if nbytes > max_bytes or not _fits(folder, nbytes - total):
            return False  # it would not fit even without all others, so none is deleted
        while found and (total + nbytes > max_bytes or not _fits(folder, nbytes)):
            oldest = found.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink(missing_ok=True)
        return nbytes <= max_bytes and _fits(folder, nbytes)


def file_signatures(files: Iterable[Path]) -> list[list[Any]]:
    """Return [path, device, inode, bytes, mtime, ctime in ns] of each file: a write always changes some of these."""
    resolved = sorted({path.resolve() for path in files})
    found = [(str(path), path.stat()) for path in resolved]
    return [[name, it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns] for name, it in found]


def packed_bytes(weights: PackedWeights) -> int:
    packed = (tensor for parts in weights.packed.values() for part in parts for tensor in part.tensors.values())
    return sum(tensor.nbytes for tensor in weights.tensors.values()) + sum(tensor.nbytes for tensor in packed)


def _fits(folder: Path, nbytes: int) -> bool:
    usage = shutil.disk_usage(folder)
    return usage.free - nbytes >= FREE_SHARE * usage.total


def _digests_path(folder: Path, signature: list[list[Any]]) -> Path:
    return folder / "known" / f"{_digest(json.dumps([each[0] for each in signature]))}.json"


def _entry_path(folder: Path, key: str) -> Path:
    kind = key.partition("\n")[0]
    return folder / "weights" / f"{_short_digest(kind)}-{_digest(key)}.safetensors"


def _short_digest(kind: str) -> str:
    return _digest(kind)[:16]


def _record_digest(signature: list[list[Any]], weight_digests: str) -> str:
    return _digest(json.dumps([VERSION, signature, weight_digests]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _LogCacheErrors:
    """Context in which an OSError is logged and ignored, since a cache that cannot be written is no fault."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if isinstance(error, OSError):
            log.warning("weights cache: %s: %s", self._what, error)
        return isinstance(error, OSError)
