"""Early reading at a start: the files that will be read are requested from the disk before Python imports torch, which
takes a second.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ....kernels.cpu.memory import prefault
from ....kernels.cpu.memory.mapped_pages import is_mappable, map_file, populate_pages
from ...host.cpu_cores import usable_cores
from ...host.host_memory import available_memory
from ...host.private_folder import cache_home
from . import packed_prefetch

if TYPE_CHECKING:
    from ...engine_config import EngineConfig

_STEP_BYTES = 8 << 20
_MAX_PREFETCH_BYTES = 8 << 30  # most bytes that are requested; nor more than a quarter of free memory


def weights_cache_folder(setting: str | None) -> Path:
    """Return the folder where repacked weights are kept. setting: a folder; None: the user's own cache. Raises
    RuntimeError.
    """
    return cache_home() / "motley" / "weights" if setting is None else Path(setting)


def hint_path(cache: Path, checkpoint: Path, device: str = "cpu") -> Path:
    """Return the path of the hint that names the cached file which this checkpoint used last. Nothing depends on the
    hint.

    device  "cpu" or "cuda", whatever its number
    """
    name = hashlib.sha256(os.fsencode(checkpoint.resolve())).hexdigest()
    return cache / "hints" / (name if device == "cpu" else f"{name}-{device}")


def likely_packed_file(checkpoint: Path, setting: str | None, device: str = "cpu") -> Path | None:
    """Return the cached file of repacked weights that this start is likely to use, as the last one did; None: there is
    none.

    setting  of the weights cache: a folder, "off", or None for the user's own

    Raises OSError, RuntimeError.
    """
    if setting == "off":
        return None
    cache = weights_cache_folder(setting)
    with suppress(FileNotFoundError):
        packed_file = cache / "weights" / Path(hint_path(cache, checkpoint, device).read_text()).name
        if packed_file.is_file():
            return packed_file
    return None


def prefetch_model(model: str | Path, config: EngineConfig) -> threading.Thread | None:
    """Request the weights of a model's folder from the disk, in a thread. Returns None if it cannot be told what will
    be read, or if the weights are not to fill the page cache.
    """
    divided = config.tensor_parallel > 1 or config.pipeline_parallel > 1
    if divided or config.weights_memory_bytes is not None or not hasattr(os, "posix_fadvise"):
        return None
    with suppress(OSError, RuntimeError, ValueError):
        folder, device = Path(model), config.device.partition(":")[0]
        if folder.is_dir():
            packed_file = likely_packed_file(folder, config.weights_cache, device)
            found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
            if device == "cpu" and usable_cores() > 1:
                if packed_file is None:
                    prefault.start_prefault(min(_prefetch_budget(), sum(path.stat().st_size for path in found)))
                else:
                    packed_prefetch.begin_packed_prefetch(packed_file)
            paths = found if packed_file is None else [packed_file]
            return prefetch_files(paths)
    return None


def prefetch_files(paths: Iterable[Path]) -> threading.Thread:
    """Request the files' pages from the disk, as far as there is free memory for them, in a thread."""
    thread = threading.Thread(target=_prefetch, args=(paths, _prefetch_budget()), name="reads early", daemon=True)
    thread.start()
    return thread


def end_prefetch() -> None:
    """Drop the early reads that were not used, since the model is loaded, or will not be."""
    prefault.stop_prefault()
    packed_prefetch.end_packed_prefetch()


def _prefetch_budget() -> int:
    return min(_MAX_PREFETCH_BYTES, available_memory() // 4)


def _prefetch(paths: Iterable[Path], max_bytes: int) -> None:
    with suppress(OSError):
        for path in paths:
            with path.open("rb", buffering=0) as file:
                size = min(os.fstat(file.fileno()).st_size, max_bytes)
                # WILLNEED is the second choice, since it handles single pages and takes ten times the CPU time.
                maps = is_mappable(path)
                for begin in range(0, size, _STEP_BYTES):
                    if not maps:
                        os.posix_fadvise(file.fileno(), begin, _STEP_BYTES, os.POSIX_FADV_WILLNEED)
                    elif populate_pages(map_file(file.fileno(), begin, min(_STEP_BYTES, size - begin))):
                        return  # the later read raises the error
            max_bytes -= size
