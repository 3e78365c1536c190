"""New weights for an offloaded model, prepared beside those in use: what has changed is written to a file of this
process.

The file has no name, so that it is deleted with the last version that uses any of it. A layer on disk is written whole,
since it is read in one piece; of weights in memory only the changed parts are. On a GPU `renewed_on_device` does it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import replace

from ...kernels.packed_layer import PackedLayerOps
from ..checkpoint import Checkpoint
from ..decoder import Decoder
from ..errors import EngineFault, Unavailable
from ..kept_file import PLAIN, KeptFileError, read_index
from ..layout import layer_spec
from .device import DeviceTier
from .open import assembled
from .plan import PARAM, Tiers, refused
from .tier import Place, Tier, extent_in
from .write import write_parts

__all__ = ["renewed_decoder", "used", "whole_layers", "with_their_layers", "written"]

AnyTier = Tier | DeviceTier


def renewed_decoder(decoder: Decoder, checkpoint: Checkpoint, changed: Collection[str]) -> Decoder:
    """Return a decoder with the checkpoint's values of the tensors that have `changed`, and with buffers of its own.

    The decoder in use stays as it is, whatever is raised: CheckpointError; Unavailable where the disk has no space;
    InvalidRequest where the new weights cannot be on disk or exceed the budget for memory.
    """
    tier, ops = decoder.tier, decoder.ops
    assert isinstance(tier, Tier)
    assert isinstance(ops, PackedLayerOps), "it was repacked before"
    changed = with_their_layers(tier, checkpoint, changed)
    places = used([written(decoder, tier, checkpoint, changed), *tier.places])
    renewed = Tier(places, _plan(tier, places), tier.budget, tier.cache)
    try:
        made = assembled(checkpoint, decoder.ops, ops, renewed, decoder, changed)
    except BaseException:
        renewed.stop()
        raise
    renewed.expected = tier.expected
    return made


def whole_layers(tier: AnyTier, checkpoint: Checkpoint, changed: Collection[str]) -> dict[int, frozenset[str]]:
    """Return the offloaded layers of which a linear has changed, each with the names of all tensors that its linears
    are made of.
    """
    found = {}
    for index in tier.plan.layers:
        linears = layer_spec(checkpoint.config, index).linears
        names = {name for linear in linears for name in checkpoint.format.tensors(linear)}
        if not names.isdisjoint(changed):
            found[index] = frozenset(names & checkpoint.tensors.keys())
    return found


def with_their_layers(tier: AnyTier, checkpoint: Checkpoint, changed: Collection[str]) -> frozenset[str]:
    """Return the changed tensors and all tensors of the offloaded layers of which a linear has changed."""
    return frozenset(changed).union(*whole_layers(tier, checkpoint, changed).values())


def written(decoder: Decoder, tier: AnyTier, checkpoint: Checkpoint, changed: frozenset[str]) -> Place:
    """Write a file of the weights that are made of these tensors, and return it. Raises what `renewed_decoder`
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
            write_parts(checkpoint, ops, ops, key, file, decoder, changed)
            return Place(file.fileno(), read_index(file.fileno(), key))
    except OSError as error:
        raise Unavailable(f"weights cannot be written to disk: {error}", code="no_room") from error
    except KeptFileError as error:
        raise EngineFault(f"{PARAM}: the file of new weights is not what was written: {error}") from error


def _plan(tier: Tier, places: list[Place]) -> Tiers:
    """Return a plan with the same layers on disk and their new sizes. Raises InvalidRequest beyond the budget."""
    layers = list(tier.plan.sizes.layers)
    for layer in tier.plan.layers:
        _, begin, end = extent_in(places, layer)
        layers[layer] = end - begin
    plan = replace(tier.plan, sizes=replace(tier.plan.sizes, layers=tuple(layers)))
    if plan.memory_bytes > tier.budget:
        raise refused(f"buffers for the new weights take it to {plan.memory_bytes} bytes, more than {tier.budget}")
    return plan


def used(places: list[Place]) -> list[Place]:
    """Return, of files of repacked weights with the newest first, those with anything that no newer one has."""
    names = {name for each in places for name in (*each.index.tree, *_others(each))}
    newest = [next(each for each in places if each.has(name)) for name in names]
    return [each for each in places if each in newest]


def _others(place: Place) -> list[str]:
    return [name.removeprefix(PLAIN) for name in place.index.tensors if name.startswith(PLAIN)]
