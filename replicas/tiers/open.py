"""Construction of a decoder on a CPU whose weights are partly on disk.

The weights on disk are in the file of repacked weights that later starts reuse. Where there is none yet it is written
first, layer by layer, so that none of them stays in memory meanwhile. Every byte of it is digested before it is used.
What is read later is not digested again, since that would take a core as long as the disk takes to read: it is the very
file that was checked, to which only this user may write, as for a file that is mapped. A read that fails or is short
ends the step.
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
    """Return what offload needs: the operators, the name of their layout, and the cache of weights. Raises
    InvalidRequest.
    """
    if cache is None:
        raise refused("layers are read from the weights cache, and there is none: weights_cache says where")
    if not isinstance(ops, PackedLayerOps) or ops.layout is None:
        raise refused(f"layers on disk need a CPU's C kernels: {ops.choices.get('cpu kernels', ops.device)}")
    return ops, ops.layout, cache


def tiered_decoder(
    checkpoint: Checkpoint, ops: Ops, cache: WeightsCache | None, key: str, budget: int
) -> tuple[Decoder, bool]:
    """Return a decoder with at most `budget` bytes of weights in memory, and whether the cache had the file of repacked
    weights already; if not, it is written first.

    Raises InvalidRequest, CheckpointError and EngineFault.
    """
    repacking, _, cache = able(ops, cache)
    opened = cache.open(key)
    found = opened is not None
    if opened is None:
        write_file(checkpoint, ops, repacking, cache, key)
        opened = cache.open(key)
    if opened is None:
        raise EngineFault(f"{PARAM}: the file of repacked weights cannot be opened just after it was written")
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
    """Return a decoder made from the files of an offload plan.

    before   decoder with other weights, from which tensors in memory are taken that have not changed
    changed  names of the tensors that have changed
    """
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
