"""Measured completion of `fit` for weights in tiers: their speed is in no table, so parts of it are measured on this
machine.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from .build import operators
from .checkpoint import Checkpoint
from .cores import usable_cores
from .early import kept_file
from .engine_config import EngineConfig
from .fit import Fit, outlined
from .tiers.placed import Placed
from .tiers.reckon import expected_on
from .tiers.speed import disk_rate, largest_file, reckoned

__all__ = ["measured"]


def measured(found: Fit, config: EngineConfig, checkpoint: Checkpoint) -> Fit:
    """Return the fit with the expected speed of weights in tiers, if there are tiers and their speed must be measured.

    For a CPU some layers and the disk are measured, for a GPU the disk alone. Raises CheckpointError, EngineFault.
    """
    if found.tiers is None or found.expected is not None:
        return found
    kept = None
    with suppress(OSError, RuntimeError):  # without a usable cache folder there is no cached file
        kind = "cpu" if found.place.device is None else "cuda"
        kept = kept_file(checkpoint.folder, config.weights_cache, kind)
    if isinstance(found.tiers, Placed):
        if not found.tiers.read_bytes or found.place.device is None:
            return found
        outline = outlined(checkpoint.config, checkpoint.format, checkpoint.tensors, found.place.ops())
        rate = disk_rate(kept or largest_file(checkpoint), max(found.tiers.sizes.layers))
        return replace(found, expected=expected_on(found.place.device, outline, found.tiers, rate))
    torch.set_num_threads(config.threads or usable_cores())
    ops, _ = operators(config, checkpoint.config.dtype)
    expected = reckoned(checkpoint, ops, found.tiers, kept)
    return replace(found, expected=expected, tpot_s=expected.step_s)
