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

from .cores import cpu_name, usable_cores
from .private_folder import drop_abandoned, is_private, written_whole
from .protocol import BATCHES, ReplicaProfile
from .rates import Rates, begin, measured

if TYPE_CHECKING:
    from ..kernels.ops import Ops
    from .engine import EngineCore
    from .engine_config import EngineConfig
    from .shards.group import Group
    from .weights_cache import WeightsCache

__all__ = ["KeptRates", "kept_rates"]

log = logging.getLogger(__name__)

FASTER, SLOWER = 1.2, 3.0  # how much faster or slower a step may be now; others may just be slowing it down
EXPIRES_S = 24 * 3600.0  # kept rates expire, so that those measured in a bad moment do not stay for good
MOST_FILES = 256
_MOST_BYTES = 1 << 16
_FOLDERS = ("families", "quantization", "shards")


class KeptRates:
    """Rates of one engine, kept in a folder that only this user can write to."""

    def __init__(self, folder: Path, key: str) -> None:
        """Choose the file in which these rates are kept. `key`: text of everything that rates depend on."""
        self._path = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def of(self, core: EngineCore) -> tuple[Rates, str]:
        """Return the kept rates if a step still takes about as long, else newly measured ones; and in words where they
        come from.
        """
        kept = self._read()
        if kept is not None:
            now, then = begin(core), kept.decode_s[0]
            said = f"a step of one sequence took {1e3 * then:.3g} ms then and {1e3 * now:.3g} ms now"
            if then / FASTER <= now <= then * SLOWER:
                return kept, f"as an earlier start measured them: {said}"
        found = measured(core)
        self._write(found)
        return found, "measured" if kept is None else f"measured anew: {said}"

    def _read(self) -> Rates | None:
        try:
            with open(self._path, "rb", opener=_follows_no_link) as file:
                found = os.fstat(file.fileno())
                if not is_private(found):
                    raise PermissionError("it belongs to another user, or others may write to it")
                if time.time() - found.st_mtime > EXPIRES_S:
                    return None
                return _checked(json.loads(file.read(_MOST_BYTES)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            log.warning("rates: the rates that an earlier start measured are not used: %s", error)
            return None

    def _write(self, found: Rates) -> None:
        try:
            with written_whole(self._path) as file:
                file.write(json.dumps(asdict(found)))
            _thin_out(self._path.parent)
        except OSError as error:
            log.warning("rates: the measured rates are not kept: %s", error)


def kept_rates(
    cache: WeightsCache | None, config: EngineConfig, ops: Ops, profile: ReplicaProfile, group: Group | None
) -> KeptRates | None:
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
        "engine": [profile.fingerprint, torch.__version__, _sources()],
        "config": asdict(config),
        "operators": dict(ops.choices),
        "machine": [cpu_name(), usable_cores(), torch.get_num_threads()],
        "processes": [[account.name, account.threads, account.dtype] for account in accounts],
        "stages": [] if group is None else [stage.layers for stage in group.stages],
    }
    return KeptRates(cache.folder / "rates", json.dumps(key, sort_keys=True))


@functools.cache
def _sources() -> str:
    """Return a digest of the code that computes, and of some more: after any change of it everything is measured
    again.
    """
    here = Path(__file__).parent
    folders = [here, *(here / name for name in _FOLDERS)]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    files += sorted((here.parent / "kernels").rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _checked(said: Mapping[str, Any]) -> Rates:
    """Return the rates that were read. Raises KeyError, TypeError, ValueError for values that cannot be rates."""
    rate, context_s = float(said["prefill_tokens_per_s"]), float(said["context_s"])
    steps = tuple(float(seconds) for seconds in said["decode_s"])
    if len(steps) != len(BATCHES) or not all(map(math.isfinite, (rate, context_s, *steps))):
        raise ValueError("not as many seconds as there are batches, or no numbers")
    if rate <= 0 or context_s < 0 or min(steps) <= 0 or list(steps) != sorted(steps):
        raise ValueError("no speed that anything could have")
    return Rates(rate, steps, context_s)


def _thin_out(folder: Path) -> None:
    """Delete all but the rates that were measured last. Other processes may do the same at this moment."""
    drop_abandoned(folder)
    ages: dict[Path, float] = {}
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):
            ages[path] = path.stat().st_mtime
    for path in sorted(ages, key=ages.__getitem__)[:-MOST_FILES]:
        path.unlink(missing_ok=True)


def _follows_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
