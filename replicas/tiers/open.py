"""From a checkpoint to a decoder whose weights are in tiers.

What is on disk is the file of repacked weights that starts keep from one to the next. Where there is none yet it is
written first, layer by layer: none of them stays in memory meanwhile. Every byte of it is digested before it is used,
as of any such file. What is read later is not digested again, since that takes a core as long as the disk takes to
read: it is of the very file that was checked, which is this user's alone, as where the file is mapped. A read that
fails or is short ends the step.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from ...kernels.ops import Ops
from ...kernels.packed_layer import PackedLayerOps
from ..checkpoint import Checkpoint
from ..decoder import Decoder
from ..errors import EngineFault
from ..layers import Layer, Source
from ..layout import layer_spec
from ..weights import Weights
from ..weights_cache import WeightsCache
from .ahead import BUFFERS
from .plan import PARAM, planned, refused
from .tier import DiskLayer, FromFile, Place, Tier, layer_of, sizes_in
from .write import write_file

__all__ = ["able", "assembled", "tiered_decoder"]


def able(ops: Ops, cache: WeightsCache | None) -> tuple[PackedLayerOps, str, WeightsCache]:
    """What is needed, and the operators' layout. Raises InvalidRequest."""
    if cache is None:
        raise refused("layers are read from the weights cache, and there is none: weights_cache says where")
    if not isinstance(ops, PackedLayerOps) or ops.layout is None:
        raise refused(f"layers on disk need a CPU's C kernels: {ops.choices.get('cpu kernels', ops.device)}")
    return ops, ops.layout, cache


def tiered_decoder(
    checkpoint: Checkpoint, ops: Ops, cache: WeightsCache | None, key: str, budget: int
) -> tuple[Decoder, bool]:
    """And whether the file was there already. Raises InvalidRequest, CheckpointError, EngineFault."""
    repacking, _, cache = able(ops, cache)
    opened = cache.open(key)
    found = opened is not None
    if opened is None:
        write_file(checkpoint, ops, repacking, cache, key)
        opened = cache.open(key)
    if opened is None:
        raise EngineFault(f"{PARAM}: the file of repacked weights is not what was written a moment ago")
    descriptor, index = opened
    try:
        plan = planned(sizes_in(index, checkpoint.config.num_layers), budget)
        repacking.restore_choices(index.choices)
        tier = Tier([Place(descriptor, index)], plan, budget, cache)
        try:
            decoder = assembled(checkpoint, ops, repacking, tier)
        except BaseException:
            tier.close()
            raise
        return decoder, found
    finally:
        os.close(descriptor)


def assembled(
    checkpoint: Checkpoint,
    ops: Ops,
    repacking: PackedLayerOps,
    tier: Tier,
    before: Decoder | None = None,
    changed: Collection[str] = frozenset(),
) -> Decoder:
    """Of the tier's files. before: has what is in memory of it, but for what has `changed`."""
    weights = Weights({}, ops.device)
    shelves = [FromFile(repacking, tier, buffer) for buffer in range(BUFFERS)]
    changed = {*changed, *(name for name in checkpoint.tensors if layer_of(name) in tier.plan.layers)}
    decoder = Decoder(
        checkpoint.config, checkpoint.format, weights, ops, shelf=shelves[0], before=before, changed=changed
    )
    second = Source(weights, checkpoint.format, ops, shelf=shelves[1])
    for index in tier.plan.layers:
        assert tier.ahead is not None
        spec, window = layer_spec(checkpoint.config, index), decoder.local.windows[index]
        twins = decoder.layers[index], Layer(decoder.local, spec, window, second)
        decoder.layers[index] = DiskLayer(index, tier.ahead, twins)
    if tier.plan.embedding:
        decoder.embedding = tier.rows()
    decoder.tier = tier
    return decoder
