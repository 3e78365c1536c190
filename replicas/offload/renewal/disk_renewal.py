"""New weights for an offloaded model, prepared beside those in use: what has changed is written to a file of this
process.

The file has no name, so that it is deleted with the last version that uses any of it. A layer on disk is written whole,
since it is read in one piece; of weights in memory only the changed parts are. On a GPU `renew_device_decoder` does it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import replace

from ....kernels.packed_layer import PackedLayerOps
from ...checkpoint.cache.packed_weights import UNPACKED_PREFIX, PackedWeightsError, read_packed_index
from ...errors import EngineFault, Unavailable
from ...model.checkpoint_inspection import Checkpoint
from ...model.decoder import Decoder
from ..device.device_tier import DeviceTier
from ..disk.disk_tier import DiskTier, TierFile, find_layer_extent
from ..disk.repacked_file_writer import write_repacked_parts
from ..disk.tiered_decoder import assemble_decoder
from ..planning.disk_plan import DEVICE_PARAM, DiskPlan, weights_memory_error

__all__ = ["changed_offloaded_layers", "files_in_use", "renew_disk_decoder", "with_whole_layers", "write_changed"]

AnyTier = DiskTier | DeviceTier


def renew_disk_decoder(decoder: Decoder, checkpoint: Checkpoint, changed: Collection[str]) -> Decoder:
    """Return a decoder with the checkpoint's values of the tensors that have `changed`, and with buffers of its own.

    The decoder in use stays as it is, whatever is raised: CheckpointError; Unavailable where the disk has no space;
    InvalidRequest where the new weights cannot be on disk or exceed the budget for memory.
    """
    tier, ops = decoder.tier, decoder.ops
    assert isinstance(tier, DiskTier)
    assert isinstance(ops, PackedLayerOps), "it was repacked before"
    changed = with_whole_layers(tier, checkpoint, changed)
    places = files_in_use([write_changed(decoder, tier, checkpoint, changed), *tier.places])
    renewed = DiskTier(places, _plan(tier, places), tier.budget, tier.cache)
    try:
        made = assemble_decoder(checkpoint, decoder.ops, ops, renewed, decoder, changed)
    except BaseException:
        renewed.stop()
        raise
    renewed.expected = tier.expected
    return made


def changed_offloaded_layers(
    tier: AnyTier, checkpoint: Checkpoint, changed: Collection[str]
) -> dict[int, frozenset[str]]:
    """Return the offloaded layers of which a linear has changed, each with the names of all tensors that its linears
    are made of.
    """
    found = {}
    for index in tier.plan.layers:
        linears = checkpoint.config.layers[index].specs
        names = {name for linear in linears for name in checkpoint.format.tensors(linear)}
        if not names.isdisjoint(changed):
            found[index] = frozenset(names & checkpoint.tensors.keys())
    return found


def with_whole_layers(tier: AnyTier, checkpoint: Checkpoint, changed: Collection[str]) -> frozenset[str]:
    """Return the changed tensors and all tensors of the offloaded layers of which a linear has changed."""
    return frozenset(changed).union(*changed_offloaded_layers(tier, checkpoint, changed).values())


def write_changed(decoder: Decoder, tier: AnyTier, checkpoint: Checkpoint, changed: frozenset[str]) -> TierFile:
    """Write a file of the weights that are made from these tensors, and return it. Raises what `renew_disk_decoder`
    raises.
    """
    ops, key = decoder.ops, secrets.token_hex(16)
    assert isinstance(ops, PackedLayerOps)
    nbytes = sum(checkpoint.tensors[name][1].nbytes for name in changed)
    try:
        file = tier.cache.unnamed(nbytes)
        if file is None:
            raise Unavailable(f"the disk of the weights cache has no room for {nbytes >> 20} MiB", code="no_room")
        with file:
            write_repacked_parts(checkpoint, ops, ops, key, file, decoder, changed)
            return TierFile(file.fileno(), read_packed_index(file.fileno(), key))
    except OSError as error:
        raise Unavailable(f"weights cannot be written to disk: {error}", code="no_room") from error
    except PackedWeightsError as error:
        raise EngineFault(f"{DEVICE_PARAM}: the file of new weights is not what was written: {error}") from error


def _plan(tier: DiskTier, places: list[TierFile]) -> DiskPlan:
    """Return a plan with the same layers on disk and their new sizes. Raises InvalidRequest beyond the budget."""
    layers = list(tier.plan.sizes.layers)
    for layer in tier.plan.layers:
        _, begin, end = find_layer_extent(places, layer)
        layers[layer] = end - begin
    plan = replace(tier.plan, sizes=replace(tier.plan.sizes, layers=tuple(layers)))
    if plan.memory_bytes > tier.budget:
        raise weights_memory_error(
            f"the new weights need {plan.memory_bytes} bytes in memory, buffers included, and {tier.budget} are allowed"
        )
    return plan


def files_in_use(places: list[TierFile]) -> list[TierFile]:
    """Return, of files of repacked weights with the newest first, those with anything that no newer one has."""
    names = {name for each in places for name in (*each.index.tree, *_others(each))}
    newest = [next(each for each in places if each.has(name)) for name in names]
    return [each for each in places if each in newest]


def _others(place: TierFile) -> list[str]:
    return [name.removeprefix(UNPACKED_PREFIX) for name in place.index.tensors if name.startswith(UNPACKED_PREFIX)]
