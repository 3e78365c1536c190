"""New weights for a GPU's offloaded model, prepared beside those in use, with buffers of their own on device and host.

What has changed is written to a file without a name, as on a CPU, and comes from there to the device, to pinned memory,
or to a buffer with every step. Layers that have not changed keep their pinned memory, which both versions share as long
as the slabs that they lie in, whole, are within the host's budget; otherwise all layers are pinned anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from ....kernels.packed_layer import PackedLayerOps
from ...checkpoint.cache.packed_weights import align_up
from ...errors import Unavailable
from ...execution.swapper import pinned_bytes, round_up_to_power_of_two
from ...host.host_memory import available_memory
from ...model.checkpoint_inspection import Checkpoint
from ...model.decoder import Decoder
from ..device.device_tier import DeviceTier
from ..device.offloaded_decoder import assemble_on_device, open_uploader
from ..device.pinned_memory import PinningError, pinned_slab_bytes
from ..disk.disk_tier import TierFile, find_layer_extent, layer_index, tensor_names
from ..planning.device_plan import DevicePlan, host_memory_error
from ..planning.disk_plan import format_mib, weights_memory_error
from .disk_renewal import changed_offloaded_layers, files_in_use, with_whole_layers, write_changed

Pinned = Mapping[int, Sequence[torch.Tensor]]


def renew_device_decoder(decoder: Decoder, checkpoint: Checkpoint, changed: Collection[str]) -> Decoder:
    """Return a decoder with the checkpoint's values of the tensors that have `changed`; all of it is loaded when this
    returns.

    The decoder in use stays as it is, whatever is raised: CheckpointError; Unavailable where disk, host or device have
    no memory for both versions; InvalidRequest where the new weights cannot be on disk, or alone would exceed a budget.
    """
    tier, ops = decoder.tier, decoder.ops
    assert isinstance(tier, DeviceTier)
    assert isinstance(ops, PackedLayerOps), "it was repacked before"
    layers = changed_offloaded_layers(tier, checkpoint, changed)
    _check_host(tier.plan, _shareable_pinned_layers(tier, tier.plan, layers))
    changed = with_whole_layers(tier, checkpoint, changed)
    places = files_in_use([write_changed(decoder, tier, checkpoint, changed), *tier.places])
    plan = _plan(tier, places)
    pinned = _shareable_pinned_layers(tier, plan, layers)
    try:
        landing = open_uploader(places, tier.copier)
        renewed = DeviceTier(places, plan, tier.copier, tier.budgets, tier.cache, pinned)
    except PinningError as error:
        raise _host_memory_error(f"no memory could be pinned for the new weights: {error}") from error
    try:
        made = assemble_on_device(checkpoint, ops, renewed, landing, decoder, changed)
    except BaseException:
        renewed.stop()
        raise
    del landing
    tier.copier.trim()
    renewed.expected = tier.expected
    return made


def _plan(tier: DeviceTier, places: list[TierFile]) -> DevicePlan:
    """Return a plan with the same layers in the same places and their new sizes. Raises InvalidRequest beyond a
    budget.
    """
    sizes, budgets = tier.plan.sizes, tier.budgets
    assert budgets.host is not None, "such a device has memory of its own"
    far = tier.plan.layers
    layers = tuple(
        _offloaded_bytes(places, layer) if layer in far else _resident_bytes(places, layer)
        for layer in range(len(sizes.layers))
    )
    plan = replace(tier.plan, sizes=replace(sizes, layers=layers))
    if plan.device_bytes > budgets.device:
        raise weights_memory_error(
            f"the new weights and their buffers take {plan.device_bytes} bytes, more than {budgets.device}"
        )
    if plan.host_bytes > budgets.host:
        raise host_memory_error(f"the new weights take {plan.host_bytes} bytes, more than {budgets.host}")
    return plan


def _offloaded_bytes(places: list[TierFile], layer: int) -> int:
    """Bytes of the linears of a layer that is offloaded."""
    _, begin, end = find_layer_extent(places, layer)
    return end - begin


def _resident_bytes(places: list[TierFile], layer: int) -> int:
    """Bytes of the linears of a layer that stays on the device; they may be in several files."""
    names = {name for place in places for name in place.index.tree if layer_index(name) == layer}
    found = [(next(place for place in places if place.has(name)).index, name) for name in names]
    return sum(align_up(index.tensors[each].nbytes) for index, name in found for each in tensor_names(index, name))


def _shareable_pinned_layers(tier: DeviceTier, plan: DevicePlan, changed: Collection[int]) -> Pinned:
    """Return the pinned layers whose memory the new weights share: all that have not changed, or none if slabs that are
    partly unused would exceed the host's budget.
    """
    assert tier.budgets.host is not None
    unchanged = {layer: pieces for layer, pieces in tier.pinned.items() if layer not in changed}
    nbytes = pinned_slab_bytes(unchanged.values(), _fresh_bytes(plan, unchanged)) + 2 * round_up_to_power_of_two(
        plan.staging_bytes
    )
    return unchanged if nbytes <= tier.budgets.host else {}


def _fresh_bytes(plan: DevicePlan, pinned: Pinned) -> int:
    """Bytes of the layers on the host that are not pinned yet."""
    return sum(plan.sizes.layers[layer] for layer in plan.on("host") if layer not in pinned)


def _check_host(plan: DevicePlan, pinned: Pinned) -> None:
    """Raise Unavailable, before anything is read, where the host lacks the memory to pin the new weights beside the old
    ones.
    """
    needed = pinned_bytes(_fresh_bytes(plan, pinned), 1) + 2 * round_up_to_power_of_two(plan.staging_bytes)
    if needed > (free := available_memory()):
        raise _host_memory_error(
            f"the new weights need {format_mib(needed)} of it pinned, and {format_mib(free)} are free"
        )


def _host_memory_error(problem: str) -> Unavailable:
    return Unavailable(f"the host's memory has no room: {problem}", code="no_room")
