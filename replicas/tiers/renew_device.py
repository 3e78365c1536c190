"""New weights for a GPU's offloaded model, prepared beside those in use, with buffers of their own on device and host.

What has changed is written to a file without a name, as on a CPU, and comes from there to the device, to pinned memory,
or to a buffer with every step. Layers that have not changed keep their pinned memory, which both versions share as long
as the slabs that they lie in, whole, are within the host's budget; otherwise all layers are pinned anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from ...kernels.packed_layer import PackedLayerOps
from ..checkpoint import Checkpoint
from ..decoder import Decoder
from ..errors import Unavailable
from ..gpu.swapper import pinned_bytes, power_of_two
from ..host_memory import available_memory
from .device import DeviceTier
from .onto import landing_of, on_device
from .pinned import NotPinned, shelves_bytes
from .placed import Placed, host_refused
from .plan import mib, refused
from .renew import used, whole_layers, with_their_layers, written
from .tier import Place, extent_in, layer_of, names_of, up

__all__ = ["renewed_on_device"]

Pinned = Mapping[int, Sequence[torch.Tensor]]


def renewed_on_device(decoder: Decoder, checkpoint: Checkpoint, changed: Collection[str]) -> Decoder:
    """Return a decoder with the checkpoint's values of the tensors that have `changed`; all of it is loaded when this
    returns.

    The decoder in use stays as it is, whatever is raised: CheckpointError; Unavailable where disk, host or device have
    no memory for both versions; InvalidRequest where the new weights cannot be on disk, or alone would exceed a budget.
    """
    tier, ops = decoder.tier, decoder.ops
    assert isinstance(tier, DeviceTier)
    assert isinstance(ops, PackedLayerOps), "it was repacked before"
    layers = whole_layers(tier, checkpoint, changed)
    _check_host(tier.plan, _stays_pinned(tier, tier.plan, layers))
    changed = with_their_layers(tier, checkpoint, changed)
    places = used([written(decoder, tier, checkpoint, changed), *tier.places])
    plan = _plan(tier, places)
    pinned = _stays_pinned(tier, plan, layers)
    try:
        landing = landing_of(places, tier.copier)
        renewed = DeviceTier(places, plan, tier.copier, tier.budgets, tier.cache, pinned)
    except NotPinned as error:
        raise _no_room(f"it does not pin memory for the new weights: {error}") from error
    try:
        made = on_device(checkpoint, ops, renewed, landing, decoder, changed)
    except BaseException:
        renewed.stop()
        raise
    del landing
    tier.copier.trim()
    renewed.expected = tier.expected
    return made


def _plan(tier: DeviceTier, places: list[Place]) -> Placed:
    """Return a plan with the same layers in the same places and their new sizes. Raises InvalidRequest beyond a
    budget.
    """
    sizes, budgets = tier.plan.sizes, tier.budgets
    assert budgets.host is not None, "such a device has memory of its own"
    far = tier.plan.layers
    layers = tuple(_far(places, layer) if layer in far else _near(places, layer) for layer in range(len(sizes.layers)))
    plan = replace(tier.plan, sizes=replace(sizes, layers=layers))
    if plan.device_bytes > budgets.device:
        raise refused(f"the new weights and their buffers take {plan.device_bytes} bytes, more than {budgets.device}")
    if plan.host_bytes > budgets.host:
        raise host_refused(f"the new weights take {plan.host_bytes} bytes, more than {budgets.host}")
    return plan


def _far(places: list[Place], layer: int) -> int:
    """Bytes of the linears of a layer that is offloaded."""
    _, begin, end = extent_in(places, layer)
    return end - begin


def _near(places: list[Place], layer: int) -> int:
    """Bytes of the linears of a layer that stays on the device; they may be in several files."""
    names = {name for place in places for name in place.index.tree if layer_of(name) == layer}
    found = [(next(place for place in places if place.has(name)).index, name) for name in names]
    return sum(up(index.tensors[each].nbytes) for index, name in found for each in names_of(index, name))


def _stays_pinned(tier: DeviceTier, plan: Placed, changed: Collection[int]) -> Pinned:
    """Return the pinned layers whose memory the new weights share: all that have not changed, or none if slabs that are
    partly unused would exceed the host's budget.
    """
    assert tier.budgets.host is not None
    kept = {layer: pieces for layer, pieces in tier.pinned.items() if layer not in changed}
    nbytes = shelves_bytes(kept.values(), _fresh_bytes(plan, kept)) + 2 * power_of_two(plan.staging_bytes)
    return kept if nbytes <= tier.budgets.host else {}


def _fresh_bytes(plan: Placed, pinned: Pinned) -> int:
    """Bytes of the layers on the host that are not pinned yet."""
    return sum(plan.sizes.layers[layer] for layer in plan.on("host") if layer not in pinned)


def _check_host(plan: Placed, pinned: Pinned) -> None:
    """Raise Unavailable, before anything is read, where the host lacks the memory to pin the new weights beside the old
    ones.
    """
    needed = pinned_bytes(_fresh_bytes(plan, pinned), 1) + 2 * power_of_two(plan.staging_bytes)
    if needed > (free := available_memory()):
        raise _no_room(f"the new weights want {mib(needed)} of it pinned, and {mib(free)} are free")


def _no_room(problem: str) -> Unavailable:
    return Unavailable(f"the host's memory has no room: {problem}", code="no_room")
