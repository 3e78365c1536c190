"""Construction of a decoder on a GPU from a file of repacked weights: all of it there, or some layers on host and disk.

Every byte of the file is digested before it is used. What stays on the device is copied there through pinned memory;
what is pinned on the host stays pinned; what is read from disk in every step is not digested again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence

from ...kernels.ops import Ops
from ...kernels.packed_layer import PackedLayerOps
from ..checkpoint import Checkpoint
from ..decoder import Decoder
from ..errors import EngineFault
from ..gpu.accelerator import Copier
from ..gpu.swapper import SLAB_BYTES
from ..layers import Layer, Source
from ..layout import layer_spec
from ..weights import Weights
from ..weights_cache import WeightsCache
from .ahead import BUFFERS
from .device import DeviceTier, FarLayer, OnDevice
from .pinned import Landing, NotPinned
from .placed import Placed, host_refused, placed
from .plan import PARAM, Budgets
from .tier import Place, layer_of, sizes_in
from .write import write_file

__all__ = ["found_decoder", "landing_of", "on_device", "placed_decoder"]

log = logging.getLogger(__name__)


def found_decoder(checkpoint: Checkpoint, ops: Ops, cache: WeightsCache, key: str, copier: Copier) -> Decoder | None:
    """Return a decoder whose weights are all on the device, from the file that the cache has under `key`.

    Returns None where the cache has none, or its weights cannot be copied to the device; the reason is logged.
    """
    opened = cache.open(key)
    if opened is None:
        return None
    descriptor, index = opened
    try:
        sizes = sizes_in(index, checkpoint.config.num_layers)
        budgets = Budgets(sizes.nbytes, 0)
        plan = placed(sizes, budgets.device, 0)
        return _assembled(checkpoint, ops, Place(descriptor, index), plan, copier, budgets, cache)
    except (OSError, EngineFault) as error:
        log.warning("weights cache: not used: %s", error)
        return None
    finally:
        os.close(descriptor)


def placed_decoder(
    checkpoint: Checkpoint, ops: Ops, cache: WeightsCache, key: str, budget: int, host: int, copier: Copier
) -> tuple[Decoder, bool]:
    """Return a decoder with at most `budget` bytes of weights on the device and `host` bytes pinned on the host, and
    whether the cache had the file of repacked weights already; if not, it is written first.

    Where all weights fit the device there is no offload. Raises InvalidRequest, CheckpointError and EngineFault.
    """
    assert isinstance(ops, PackedLayerOps)
    opened = cache.open(key)
    found = opened is not None
    if opened is None:
        write_file(checkpoint, ops, ops, cache, key)
        opened = cache.open(key)
    if opened is None:
        raise EngineFault(f"{PARAM}: the file of repacked weights cannot be opened just after it was written")
    descriptor, index = opened
    try:
        plan = placed(sizes_in(index, checkpoint.config.num_layers), budget, host)
        log.info("weights: %s", plan)
        budgets = Budgets(budget, host)
        return _assembled(checkpoint, ops, Place(descriptor, index), plan, copier, budgets, cache), found
    finally:
        os.close(descriptor)


def on_device(
    checkpoint: Checkpoint,
    ops: Ops,
    tier: DeviceTier,
    landing: Landing,
    before: Decoder | None = None,
    changed: Collection[str] = frozenset(),
) -> Decoder:
    """Return a decoder made from the files of an offload plan.

    before   decoder with other weights, from which tensors on the device are taken that have not changed
    changed  names of the tensors that have changed
    """
    assert isinstance(ops, PackedLayerOps)
    weights = Weights({}, ops.device)
    shelves = [OnDevice(ops, tier, landing, buffer) for buffer in range(BUFFERS)]
    changed = {*changed, *(name for name in checkpoint.tensors if layer_of(name) in tier.plan.layers)}
    try:
        decoder = Decoder(
            checkpoint.config, checkpoint.format, weights, ops, shelf=shelves[0], before=before, changed=changed
        )
        second = Source(weights, checkpoint.format, ops, shelf=shelves[1])
        for index in tier.plan.layers:
            spec, window = layer_spec(checkpoint.config, index), decoder.local.windows[index]
            twin = Layer(decoder.local, spec, window, second)
            decoder.layers[index] = FarLayer(index, (decoder.layers[index], twin))
    finally:
        landing.land()  # even after an error: the memory must stay until the copies in flight have ended
    if tier.plan.layers:
        decoder.tier = tier
    return decoder


def landing_of(places: Sequence[Place], copier: Copier) -> Landing:
    """Return buffers for copying what these files hold to the device. Raises NotPinned."""
    largest = max(info.nbytes for place in places for info in place.index.tensors.values())
    try:
        return Landing(copier, min(SLAB_BYTES, largest))
    except RuntimeError as error:
        raise NotPinned(str(error)) from error


def _assembled(
    checkpoint: Checkpoint,
    ops: Ops,
    place: Place,
    plan: Placed,
    copier: Copier,
    budgets: Budgets,
    cache: WeightsCache,
) -> Decoder:
    assert isinstance(ops, PackedLayerOps)
    ops.restore_choices(place.index.choices)
    try:
        landing = _landing(place, copier)
        tier = _tier(place, plan, copier, budgets, cache)
    except BaseException:
        place.file.close()
        raise
    try:
        decoder = on_device(checkpoint, ops, tier, landing)
    except BaseException:
        tier.close()
        raise
    del landing
    copier.trim()
    if decoder.tier is None:
        tier.close()
    return decoder


def _landing(place: Place, copier: Copier) -> Landing:
    try:
        return landing_of([place], copier)
    except NotPinned as error:
        raise EngineFault(f"the host does not pin the memory that weights are copied through: {error}") from error


def _tier(place: Place, plan: Placed, copier: Copier, budgets: Budgets, cache: WeightsCache) -> DeviceTier:
    try:
        return DeviceTier([place], plan, copier, budgets, cache)
    except NotPinned as error:
        raise host_refused(f"the host does not pin {plan.host_bytes} bytes: {error}") from error
