"""Rates of a CPU as an earlier start has measured them, kept beside its weights. Measuring takes a second or more,
during which a replica that replaces another would not serve.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...host.cpu_cores import cpu_name, usable_cores
from ...host.private_folder import is_private, remove_abandoned, write_atomically
from ...types import PROFILED_BATCH_SIZES, ReplicaProfile
from .engine_rates import EngineRates, measure_decode_step, measure_rates

if TYPE_CHECKING:
    from ....kernels.ops import Ops
    from ...checkpoint.cache.weights_cache import WeightsCache
    from ...engine_config import EngineConfig
    from ...parallel.leader.follower_group import FollowerGroup
    from ..engine import EngineCore

log = logging.getLogger(__name__)

FASTER, SLOWER = 1.2, 3.0  # how much faster or slower a step may be now; others may just be slowing it down
EXPIRES_S = 24 * 3600.0  # kept rates expire, so that those measured in a bad moment do not stay for good
MAX_FILES = 256
_MAX_FILE_BYTES = 1 << 16
_FOLDERS = (
    "capacity", "checkpoint", "engine", "execution", "grammar", "host", "kv", "loading", "model", "parallel",
    "quantization", "text",
)  # fmt: skip


class CachedRates:
    """Rates of one engine, kept in a folder that only this user can write to."""

    def __init__(self, folder: Path, key: str) -> None:
        """Choose the file in which these rates are kept. `key`: text of everything that rates depend on."""
        self._path = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def of(self, core: EngineCore) -> tuple[EngineRates, str]:
        """Return the kept rates if a step still takes about as long, else newly measured ones; and in words where they
        come from.
        """
        cached = self._read()
        if cached is not None:
            now, then = measure_decode_step(core), cached.decode_s[0]
            said = f"a step of one sequence took {1e3 * then:.3g} ms then and {1e3 * now:.3g} ms now"
            if then / FASTER <= now <= then * SLOWER:
                return cached, f"as an earlier start measured them: {said}"
        found = measure_rates(core)
        self._write(found)
        return found, "measured" if cached is None else f"measured anew: {said}"

    def _read(self) -> EngineRates | None:
        try:
            with open(self._path, "rb", opener=_follows_no_link) as file:
                found = os.fstat(file.fileno())
                if not is_private(found):
                    raise PermissionError("it belongs to another user, or others may write to it")
                if time.time() - found.st_mtime > EXPIRES_S:
                    return None
                return _parse_rates(json.loads(file.read(_MAX_FILE_BYTES)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            log.warning("the rates that an earlier start measured are not used: %s", error)
            return None

    def _write(self, found: EngineRates) -> None:
        try:
            with write_atomically(self._path) as file:
                file.write(json.dumps(asdict(found)))
            _evict_oldest(self._path.parent)
        except OSError as error:
            log.warning("the measured rates are not kept: %s", error)


def cached_rates(
    cache: WeightsCache | None, config: EngineConfig, ops: Ops, profile: ReplicaProfile, group: FollowerGroup | None
) -> CachedRates | None:
    """Return the kept rates of an engine with that profile on this machine's CPU; None: they are measured at each
    start.

    They are always measured on a GPU, where that takes little time and loads what runs for the first time, and for a
    model that other machines have a part of.
    """
    accounts = () if group is None else group.accounts()
    if cache is None or ops.device.type != "cpu" or any(account.on_device for account in accounts):
        return None
    if config.weights_memory_bytes is not None or (group is not None and not group.shares_memory):
        return None
    key = {
        "engine": [profile.fingerprint, torch.__version__, _source_digest()],
        "config": asdict(config),
        "operators": dict(ops.choices),
        "machine": [cpu_name(), usable_cores(), torch.get_num_threads()],
        "processes": [[account.name, account.threads, account.dtype] for account in accounts],
        "stages": [] if group is None else [stage.layers for stage in group.stages],
    }
    return CachedRates(cache.folder / "rates", json.dumps(key, sort_keys=True))


@functools.cache
def _source_digest() -> str:
    """Return a digest of the code that computes, and of some more: after any change of it everything is measured
    again.
    """
    replicas = Path(__file__).parents[2]
    folders = [*(replicas / name for name in _FOLDERS), replicas.parent / "kernels"]
    files = [*sorted(replicas.glob("*.py")), *(file for folder in folders for file in sorted(folder.rglob("*.py")))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _parse_rates(said: Mapping[str, Any]) -> EngineRates:
    """Return the rates that were read. Raises KeyError, TypeError, ValueError for values that cannot be rates."""
    rate, context_s = float(said["prefill_tokens_per_s"]), float(said["context_s"])
    steps = tuple(float(seconds) for seconds in said["decode_s"])
    if len(steps) != len(PROFILED_BATCH_SIZES) or not all(map(math.isfinite, (rate, context_s, *steps))):
        raise ValueError("decode_s has not one number for each batch size, or a value is not a finite number")
    if rate <= 0 or context_s < 0 or min(steps) <= 0 or list(steps) != sorted(steps):
        raise ValueError("a rate or time is negative or zero, or a larger batch takes less time than a smaller one")
    return EngineRates(rate, steps, context_s)


def _evict_oldest(folder: Path) -> None:
    """Delete all but the rates that were measured last. Other processes may do the same at this moment."""
    remove_abandoned(folder)
    ages: dict[Path, float] = {}
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):
            ages[path] = path.stat().st_mtime
    for path in sorted(ages, key=ages.__getitem__)[:-MAX_FILES]:
        path.unlink(missing_ok=True)


def _follows_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
