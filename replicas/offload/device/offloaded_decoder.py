"""Construction of a decoder on a GPU from a file of repacked weights: all of it there, or some layers on host and disk.

Every byte of the file is digested before it is used. What stays on the device is copied there through pinned memory;
what is pinned on the host stays pinned; what is read from disk in every step is not digested again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence

from ....kernels.ops import Ops
from ....kernels.packed_layer import PackedLayerOps
from ...checkpoint.cache.weights_cache import WeightsCache
from ...checkpoint.reading.weight_loader import WeightLoader
from ...errors import EngineFault
from ...execution.copier import Copier
from ...execution.swapper import SLAB_BYTES
from ...model.checkpoint_inspection import Checkpoint
from ...model.decoder import Decoder
from ...model.layers import Layer
from ...model.parts.layer_source import LayerSource
from ..disk.disk_tier import TierFile, layer_index, read_weight_sizes
from ..disk.layer_prefetch import NUM_BUFFERS
from ..disk.repacked_file_writer import open_repacked_file
from ..planning.device_plan import DevicePlan, host_memory_error, plan_device
from ..planning.disk_plan import WeightBudgets
from .device_tier import DeviceTier, DeviceTierRepackCache, OffloadedLayer
from .pinned_memory import DeviceUploader, PinningError

__all__ = ["assemble_on_device", "load_cached_decoder", "load_offloaded_decoder", "open_uploader"]

log = logging.getLogger(__name__)


def load_cached_decoder(
    checkpoint: Checkpoint, ops: Ops, cache: WeightsCache, key: str, copier: Copier
) -> Decoder | None:
    """Return a decoder whose weights are all on the device, from the file that the cache has under `key`.

    Returns None where the cache has none, or its weights cannot be copied to the device; the reason is logged.
    """
    opened = cache.open(key)
    if opened is None:
        return None
    descriptor, index = opened
    try:
        sizes = read_weight_sizes(index, checkpoint.config.num_layers)
        budgets = WeightBudgets(sizes.nbytes, 0)
        plan = plan_device(sizes, budgets.device, 0)
        return _assemble_offloaded(checkpoint, ops, TierFile(descriptor, index), plan, copier, budgets, cache)
    except (OSError, EngineFault) as error:
        log.warning("weights cache: not used: %s", error)
        return None
    finally:
        os.close(descriptor)


def load_offloaded_decoder(
    checkpoint: Checkpoint, ops: Ops, cache: WeightsCache, key: str, budget: int, host: int, copier: Copier
) -> tuple[Decoder, bool]:
    """Return a decoder with at most `budget` bytes of weights on the device and `host` bytes pinned on the host, and
    whether the cache had the file of repacked weights already; if not, it is written first.

    Where all weights fit the device there is no offload. Raises InvalidRequest, CheckpointError and EngineFault.
    """
    assert isinstance(ops, PackedLayerOps)
    descriptor, index, found = open_repacked_file(checkpoint, ops, ops, cache, key)
    try:
        plan = plan_device(read_weight_sizes(index, checkpoint.config.num_layers), budget, host)
        log.info("weights: %s", plan)
        budgets = WeightBudgets(budget, host)
        return _assemble_offloaded(checkpoint, ops, TierFile(descriptor, index), plan, copier, budgets, cache), found
    finally:
        os.close(descriptor)


def assemble_on_device(
    checkpoint: Checkpoint,
    ops: Ops,
    tier: DeviceTier,
    landing: DeviceUploader,
    before: Decoder | None = None,
    changed: Collection[str] = frozenset(),
) -> Decoder:
    """Return a decoder made from the files of an offload plan.

    before   decoder with other weights, from which tensors on the device are taken that have not changed
    changed  names of the tensors that have changed
    """
    assert isinstance(ops, PackedLayerOps)
    weights = WeightLoader({}, ops.device)
    repack_caches = [DeviceTierRepackCache(ops, tier, landing, buffer) for buffer in range(NUM_BUFFERS)]
    changed = {*changed, *(name for name in checkpoint.tensors if layer_index(name) in tier.plan.layers)}
    try:
        decoder = Decoder(
            checkpoint.config,
            checkpoint.format,
            weights,
            ops,
            repack_cache=repack_caches[0],
            before=before,
            changed=changed,
        )
        second = LayerSource(weights, checkpoint.format, ops, repack_cache=repack_caches[1])
        for index in tier.plan.layers:
            twin = Layer(decoder.local.layers[index], second)
            decoder.layers[index] = OffloadedLayer(index, (decoder.layers[index], twin))
    finally:
        landing.land()  # even after an error: the memory must stay until the copies in flight have ended
    if tier.plan.layers:
        decoder.tier = tier
    return decoder


def open_uploader(places: Sequence[TierFile], copier: Copier) -> DeviceUploader:
    """Return buffers for copying what these files hold to the device. Raises PinningError."""
    largest = max(info.nbytes for place in places for info in place.index.tensors.values())
    try:
        return DeviceUploader(copier, min(SLAB_BYTES, largest))
    except RuntimeError as error:
        raise PinningError(str(error)) from error


def _assemble_offloaded(
    checkpoint: Checkpoint,
    ops: Ops,
    place: TierFile,
    plan: DevicePlan,
    copier: Copier,
    budgets: WeightBudgets,
    cache: WeightsCache,
) -> Decoder:
    assert isinstance(ops, PackedLayerOps)
    ops.restore_choices(place.index.choices)
    try:
        landing = _open_file_uploader(place, copier)
        tier = _open_device_tier(place, plan, copier, budgets, cache)
    except BaseException:
        place.file.close()
        raise
    try:
        decoder = assemble_on_device(checkpoint, ops, tier, landing)
    except BaseException:
        tier.close()
        raise
    del landing
    copier.trim()
    if decoder.tier is None:
        tier.close()
    return decoder


def _open_file_uploader(place: TierFile, copier: Copier) -> DeviceUploader:
    try:
        return open_uploader([place], copier)
    except PinningError as error:
        raise EngineFault(f"the host does not pin the memory that weights are copied through: {error}") from error


def _open_device_tier(
    place: TierFile, plan: DevicePlan, copier: Copier, budgets: WeightBudgets, cache: WeightsCache
) -> DeviceTier:
    try:
        return DeviceTier([place], plan, copier, budgets, cache)
    except PinningError as error:
        raise host_memory_error(f"the host does not pin {plan.host_bytes} bytes: {error}") from error
