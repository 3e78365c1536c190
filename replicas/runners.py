"""Choice of an engine's runner: on a CPU or on a GPU, for a whole model or for one that is divided among processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..kernels.contract import DeviceOps
from ..kernels.ops import Ops
from . import sizing
from .blocks import blocks_for
from .engine_config import EngineConfig
from .errors import InvalidRequest
from .gpu.accelerator import Accelerator, AtOnce, Copier
from .gpu.swapper import Swapper
from .model import LoadedModel
from .prefix.setup import lent_blocks
from .runner import ModelRunner
from .shards.group import Group
from .shards.lead import Lead, Line
from .shards.runner import StagedRunner
from .shards.swapper import SharedSwapper
from .swapping import swapper_of
from .tiers.parted import in_parts

if TYPE_CHECKING:
    from .gpu.runner import GpuRunner
    from .shards.gpu_staged import GpuStagedRunner

__all__ = ["runner_of"]


def runner_of(
    loaded: LoadedModel,
    ops: Ops,
    accelerator: Accelerator | None,
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    lends: bool,
    group: Group | None,
) -> tuple[ModelRunner | GpuRunner | GpuStagedRunner, int, str]:
    """Return the runner, how many of its host blocks are lent to prefixes, and why it has that many for itself.

    accelerator  None: a CPU
    lends        whether host blocks are lent to prefixes, as far as the processes can
    group        processes of which `loaded` is a part; the other processes have allocated their KV when this returns
    """
    found: tuple[ModelRunner | GpuRunner | GpuStagedRunner, int, str]
    if accelerator is not None:
        found = _of_device(loaded, ops, accelerator, config, num_blocks, max_model_len, lends, group)
    else:
        found = _of_cpu(loaded, ops, config, num_blocks, max_model_len, lends, group)
    if group is not None:
        kept = 0 if found[0].swapper is None else found[0].swapper.num_blocks
        group.allocate(num_blocks, kept, ops, loaded.fingerprint, max_model_len)
    return found


def _of_cpu(
    loaded: LoadedModel,
    ops: Ops,
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    lends: bool,
    group: Group | None,
) -> tuple[ModelRunner, int, str]:
    kv = ops.allocate_kv(*sizing.kv_geometry(loaded, num_blocks))
    swapper, lent, why = _swapper(loaded, ops, AtOnce(), config, kv, max_model_len, lends, group)
    if group is None:
        return ModelRunner(loaded.decoder, kv, ops.device, swapper), lent, why
    if len(group.stages) > 1:
        return StagedRunner(Line(loaded.decoder, group), kv, ops.device, swapper), lent, why
    return ModelRunner(Lead(loaded.decoder, group), kv, ops.device, swapper), lent, why


def _of_device(
    loaded: LoadedModel,
    ops: Ops,
    accelerator: Accelerator,
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    lends: bool,
    group: Group | None,
) -> tuple[GpuRunner | GpuStagedRunner, int, str]:
    from .gpu.runner import GpuRunner  # imports Triton, which an engine on a CPU does without
    from .shards.gpu_lead import GpuLead, Guarded, Together
    from .shards.gpu_staged import GpuLine, GpuStagedRunner

    assert isinstance(ops, DeviceOps), "an accelerator's operators choose tokens"
    loaded.decoder.rotary.reserve(max_model_len)  # graphs hold the table's address, so it must not grow
    kv = ops.allocate_kv(*sizing.kv_geometry(loaded, num_blocks + 1))  # the last is for the padding of graphs
    longest = blocks_for(max_model_len)
    bounds: dict[str, int] = {
        "max_running": config.max_running,
        "max_model_len": max_model_len,
        "longest_blocks": longest,
        "padding_block": num_blocks,
        "vocab_size": loaded.config.vocab_size,
        "max_drafts": config.speculate_ngram,
    }
    swapper, lent, why = _swapper(loaded, ops, accelerator, config, kv, max_model_len, lends, group)
    if group is not None and len(group.stages) > 1:
        accelerator = Guarded(accelerator, group)
        line = GpuLine(loaded.decoder, group, accelerator)
        return GpuStagedRunner(line, kv, ops, accelerator, swapper=swapper, **bounds), lent, why
    model: GpuLead | None = None
    if group is not None:
        model = GpuLead(loaded.decoder, group)
        accelerator = Together(accelerator, group, model)
    runner = GpuRunner(
        model or in_parts(loaded.decoder, accelerator),
        kv,
        ops,
        accelerator,
        **bounds,
        graphs=config.graphs,
        swapper=swapper,
    )
    return runner, lent, why


def _swapper(
    loaded: LoadedModel,
    ops: Ops,
    copier: Copier,
    config: EngineConfig,
    kv: Sequence[torch.Tensor],
    max_model_len: int,
    lends: bool,
    group: Group | None,
) -> tuple[Swapper | None, int, str]:
    """Return the swapper, the blocks lent to prefixes, and why. copier: for this process's own part of KV."""
    if group is not None and (why := group.why_kv_stays):
        if config.swap_memory_bytes:
            raise InvalidRequest(f"swap_memory_bytes: KV is not kept on the host: {why}", param="swap_memory_bytes")
        return None, 0, f"by computing again: {why}"
    parts = [part for cache in kv for part in ops.kv_parts(cache)]
    block_bytes = sum(part[0].nbytes for part in parts) if group is None else group.block_bytes(ops)
    lent = lent_blocks(config, loaded, ops, block_bytes) if lends else 0

    def make(blocks: int) -> Swapper:
        return Swapper(parts, copier, blocks) if group is None else SharedSwapper(parts, copier, blocks, group)

    most = config.max_running * blocks_for(max_model_len)
    swapper, why = swapper_of(config, ops, block_bytes, make, copier, most, lent)
    return swapper, lent, why
