"""Measured completion of `fit` for weights in tiers: their speed is in no table, so parts of it are measured on this
machine.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from ...capacity.device_fit import FitResult, build_meta_decoder
from ...checkpoint.cache.startup_prefetch import likely_packed_file
from ...engine_config import EngineConfig
from ...host.cpu_cores import usable_cores
from ...loading.operator_choice import choose_operators
from ...model.checkpoint_inspection import Checkpoint
from ...offload.disk.disk_speed import largest_file, measure_disk_rate, measure_planned_decode
from ...offload.planning.decode_estimate import estimate_decode
from ...offload.planning.device_plan import DevicePlan


def add_measured_speed(found: FitResult, config: EngineConfig, checkpoint: Checkpoint) -> FitResult:
    """Return the fit with the expected speed of weights in tiers, if there are tiers and their speed must be measured.

    For a CPU some layers and the disk are measured, for a GPU the disk alone. Raises CheckpointError, EngineFault.
    """
    if found.tiers is None or found.expected is not None:
        return found
    packed_file = None
    with suppress(OSError, RuntimeError):  # without a usable cache folder there is no cached file
        kind = "cpu" if found.place.device is None else "cuda"
        packed_file = likely_packed_file(checkpoint.folder, config.weights_cache, kind)
    if isinstance(found.tiers, DevicePlan):
        if not found.tiers.read_bytes or found.place.device is None:
            return found
        outline = build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, found.place.ops())
        rate = measure_disk_rate(packed_file or largest_file(checkpoint), max(found.tiers.sizes.layers))
        return replace(found, expected=estimate_decode(found.place.device, outline, found.tiers, rate))
    torch.set_num_threads(config.threads or usable_cores())
    ops, _ = choose_operators(config, checkpoint.config.dtype)
    expected = measure_planned_decode(checkpoint, ops, found.tiers, packed_file)
    return replace(found, expected=expected, tpot_s=expected.step_s)
