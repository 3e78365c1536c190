"""The disk's part of a start: what will be read is asked for before Python imports torch, which takes a second."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernels.cpu.memory import prefault
from ..kernels.cpu.memory.mapped_pages import is_mappable, map_file, populate_pages
from . import kept_early
from .cores import usable_cores
from .host_memory import available_memory
from .private_folder import cache_home

if TYPE_CHECKING:
    from .engine_config import EngineConfig

__all__ = ["ask", "ask_early", "cache_folder", "end_early", "hint_path", "kept_file"]

_STEP_BYTES = 8 << 20
_MOST_BYTES = 8 << 30  # nor more than a quarter of what is free


def cache_folder(setting: str | None) -> Path:
    """Where repacked weights are kept. setting: a folder; None: the user's own. Raises RuntimeError."""
    return cache_home() / "motley" / "weights" if setting is None else Path(setting)


def hint_path(cache: Path, checkpoint: Path, device: str = "cpu") -> Path:
    """The name of what was used last of a cache for that checkpoint is in it: a hint, and nothing hangs on it.

    device  "cpu" or "cuda", whatever its number
    """
    name = hashlib.sha256(os.fsencode(checkpoint.resolve())).hexdigest()
    return cache / "hints" / (name if device == "cpu" else f"{name}-{device}")


def kept_file(checkpoint: Path, setting: str | None, device: str = "cpu") -> Path | None:
    """What a start is likely to find repacked, as it was last. setting: of the cache. Raises OSError, RuntimeError."""
    if setting == "off":
        return None
    cache = cache_folder(setting)
    with suppress(FileNotFoundError):
        kept = cache / "weights" / Path(hint_path(cache, checkpoint, device).read_text()).name
        if kept.is_file():
            return kept
    return None


def ask_early(model: str | Path, config: EngineConfig) -> threading.Thread | None:
    """In a thread, of a folder; None: it cannot be told what will be read, or that shall not be in the page cache."""
    divided = config.tensor_parallel > 1 or config.pipeline_parallel > 1
    if divided or config.weights_memory_bytes is not None or not hasattr(os, "posix_fadvise"):
        return None
    with suppress(OSError, RuntimeError, ValueError):
        folder, device = Path(model), config.device.partition(":")[0]
        if folder.is_dir():
            kept = kept_file(folder, config.weights_cache, device)
            found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
            if device == "cpu" and usable_cores() > 1:
                if kept is None:
                    prefault.start_prefault(min(_room(), sum(path.stat().st_size for path in found)))
                else:
                    kept_early.begin(kept)
            paths = found if kept is None else [kept]
            return ask(paths)
    return None


def ask(paths: Iterable[Path]) -> threading.Thread:
    """For the files' pages, as far as there is room for them, in a thread."""
    thread = threading.Thread(target=_ask, args=(paths, _room()), name="reads early", daemon=True)
    thread.start()
    return thread


def end_early() -> None:
    """The model is loaded, or will not be: what was begun for it and not taken goes."""
    prefault.stop_prefault()
    kept_early.end()


def _room() -> int:
    return min(_MOST_BYTES, available_memory() // 4)


def _ask(paths: Iterable[Path], room: int) -> None:
    with suppress(OSError):
        for path in paths:
            with path.open("rb", buffering=0) as file:
                size = min(os.fstat(file.fileno()).st_size, room)
                # Not by WILLNEED where there is a choice: that takes single pages, for ten times the processor's time.
                maps = is_mappable(path)
                for begin in range(0, size, _STEP_BYTES):
                    if not maps:
                        os.posix_fadvise(file.fileno(), begin, _STEP_BYTES, os.POSIX_FADV_WILLNEED)
                    elif populate_pages(map_file(file.fileno(), begin, min(_STEP_BYTES, size - begin))):
                        return  # whoever reads it is told why
            room -= size
