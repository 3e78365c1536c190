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

from ....kernels.ops import Ops
from ....kernels.packed_layer import PackedLayerOps
from ...checkpoint.cache.weights_cache import WeightsCache
from ...checkpoint.reading.weight_loader import WeightLoader
from ...model.checkpoint_inspection import Checkpoint
from ...model.decoder import Decoder
from ...model.layers import Layer
from ...model.parts.layer_source import LayerSource
from ..planning.disk_plan import plan_disk, weights_memory_error
from .disk_tier import DiskLayer, DiskTier, DiskTierRepackCache, TierFile, layer_index, read_weight_sizes
from .layer_prefetch import NUM_BUFFERS
from .repacked_file_writer import open_repacked_file

__all__ = ["assemble_decoder", "load_tiered_decoder", "require_repacking"]


def require_repacking(ops: Ops, cache: WeightsCache | None) -> tuple[PackedLayerOps, str, WeightsCache]:
    """Return what offload needs: the operators, the name of their layout, and the cache of weights. Raises
    InvalidRequest.
    """
    if cache is None:
        raise weights_memory_error(
            "layers are read from the weights cache, and there is none: weights_cache says where"
        )
    if not isinstance(ops, PackedLayerOps) or ops.layout is None:
        raise weights_memory_error(
            f"layers on disk need a CPU's C kernels: {ops.choices.get('cpu kernels', ops.device)}"
        )
    return ops, ops.layout, cache


def load_tiered_decoder(
    checkpoint: Checkpoint, ops: Ops, cache: WeightsCache | None, key: str, budget: int
) -> tuple[Decoder, bool]:
    """Return a decoder with at most `budget` bytes of weights in memory, and whether the cache had the file of repacked
    weights already; if not, it is written first.

    Raises InvalidRequest, CheckpointError and EngineFault.
    """
    repacking, _, cache = require_repacking(ops, cache)
    descriptor, index, found = open_repacked_file(checkpoint, ops, repacking, cache, key)
    try:
        plan = plan_disk(read_weight_sizes(index, checkpoint.config.num_layers), budget)
        repacking.restore_choices(index.choices)
        tier = DiskTier([TierFile(descriptor, index)], plan, budget, cache)
        try:
            decoder = assemble_decoder(checkpoint, ops, repacking, tier)
        except BaseException:
            tier.close()
            raise
        return decoder, found
    finally:
        os.close(descriptor)


def assemble_decoder(
    checkpoint: Checkpoint,
    ops: Ops,
    repacking: PackedLayerOps,
    tier: DiskTier,
    before: Decoder | None = None,
    changed: Collection[str] = frozenset(),
) -> Decoder:
    """Return a decoder made from the files of an offload plan.

    before   decoder with other weights, from which tensors in memory are taken that have not changed
    changed  names of the tensors that have changed
    """
    weights = WeightLoader({}, ops.device)
    repack_caches = [DiskTierRepackCache(repacking, tier, buffer) for buffer in range(NUM_BUFFERS)]
    changed = {*changed, *(name for name in checkpoint.tensors if layer_index(name) in tier.plan.layers)}
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
        assert tier.ahead is not None
        twins = decoder.layers[index], Layer(decoder.local.layers[index], second)
        decoder.layers[index] = DiskLayer(index, tier.ahead, twins)
    if tier.plan.embedding:
        decoder.embedding = tier.rows()
    decoder.tier = tier
    return decoder
