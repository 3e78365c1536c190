"""From a kept file to a decoder on a device: all of it there, or some layers on the host and on disk.

Every byte of the file is digested before it is used, as of any such file. What stays on the device goes there by way of
pinned memory; what is pinned on the host stays so; what is read from disk in every step is not digested again.
"""

from __future__ import annotations

import logging
import os

from ...kernels.ops import Ops
from ...kernels.packed import Repacking
from ..checkpoint import Checkpoint
from ..decoder import Decoder
from ..errors import EngineFault
from ..gpu.accelerator import Copier
from ..gpu.swapper import SLAB_BYTES
from ..kept_file import Index
from ..layers import Layer, Source
from ..layout import layer_spec
from ..weights import Weights
from ..weights_cache import WeightsCache
from .ahead import BUFFERS
from .device import DeviceTier, FarLayer, OnDevice
from .pinned import Landing
from .placed import Placed, placed
from .plan import PARAM
from .tier import Place, sizes_in
from .write import write_file

__all__ = ["found_decoder", "placed_decoder"]

log = logging.getLogger(__name__)


def found_decoder(checkpoint: Checkpoint, ops: Ops, cache: WeightsCache, key: str, copier: Copier) -> Decoder | None:
    """All of it on the device, as it was kept; None: nothing is, or it cannot be brought there so."""
    opened = cache.open(key)
    if opened is None:
        return None
    descriptor, index = opened
    try:
        sizes = sizes_in(index, checkpoint.config.num_layers)
        return _assembled(checkpoint, ops, Place(descriptor, index), placed(sizes, sizes.nbytes, 0), copier)
    except (OSError, EngineFault) as error:
        log.warning("weights cache: not used: %s", error)
        return None
    finally:
        os.close(descriptor)


def placed_decoder(
    checkpoint: Checkpoint, ops: Ops, cache: WeightsCache, key: str, budget: int, host: int, copier: Copier
) -> tuple[Decoder, bool]:
    """With so many bytes of the device and of the host for weights; without a tier where all of it has room there.

    And whether the file was there already.

    Raises InvalidRequest, CheckpointError, EngineFault.
    """
    assert isinstance(ops, Repacking)
    opened = cache.open(key)
    found = opened is not None
    if opened is None:
        write_file(checkpoint, ops, ops, cache, key)
        opened = cache.open(key)
    if opened is None:
        raise EngineFault(f"{PARAM}: the file of repacked weights is not what was written a moment ago")
    descriptor, index = opened
    try:
        plan = placed(sizes_in(index, checkpoint.config.num_layers), budget, host)
        log.info("weights: %s", plan)
        return _assembled(checkpoint, ops, Place(descriptor, index), plan, copier), found
    finally:
        os.close(descriptor)


def _assembled(checkpoint: Checkpoint, ops: Ops, place: Place, plan: Placed, copier: Copier) -> Decoder:
    assert isinstance(ops, Repacking)
    ops.recall(place.index.choices)
    try:
        landing = _landing(place.index, copier)
        tier = DeviceTier(place, plan, copier)
    except BaseException:
        place.file.close()
        raise
    try:
        weights = Weights({}, ops.device)
        shelves = [OnDevice(ops, tier, landing, buffer) for buffer in range(BUFFERS)]
        decoder = Decoder(checkpoint.config, checkpoint.format, weights, ops, shelf=shelves[0])
        second = Source(weights, checkpoint.format, ops, shelf=shelves[1])
        for index in plan.layers:
            spec, window = layer_spec(checkpoint.config, index), decoder.local.windows[index]
            decoder.layers[index] = FarLayer(index, (decoder.layers[index], Layer(decoder.local, spec, window, second)))
        landing.land()
    except BaseException:
        tier.close()
        raise
    del landing, shelves, second
    copier.trim()
    if plan.layers:
        decoder.tier = tier
    else:
        tier.close()
    return decoder


def _landing(index: Index, copier: Copier) -> Landing:
    largest = max(info.nbytes for info in index.tensors.values())
    try:
        return Landing(copier, min(SLAB_BYTES, largest))
    except RuntimeError as error:
        raise EngineFault(f"the host does not pin the memory that weights are copied through: {error}") from error
