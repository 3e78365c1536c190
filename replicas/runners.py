"""The runner of an engine: on a CPU or on a GPU, of a whole model or of one that processes have parts of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..kernels.contract import DeviceOps
from ..kernels.ops import Ops
from . import sizing
from .blocks import blocks_for
from .engine_config import EngineConfig
from .gpu.accelerator import Accelerator, AtOnce
from .model import LoadedModel
from .prefix.setup import lent_blocks
from .runner import ModelRunner
from .shards.group import Group
from .shards.lead import Lead, Line
from .shards.runner import StagedRunner
from .shards.swapper import shared_swapper
from .swapping import swapper_of
from .tiers.parted import in_parts

if TYPE_CHECKING:
    from .gpu.runner import GpuRunner
    from .shards.gpu_staged import GpuStagedRunner

__all__ = ["runner_of"]

_NOT_KEPT = "by computing again: that of a model that is divided among GPUs is not kept on the host so far"


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
    """With blocks of the host, how many of them are lent to prefixes, and why it has so many for itself.

    accelerator  None: of a CPU
    lends        to prefixes, as far as processes can
    group        of which `loaded` is a part, and whose other processes have made room when this returns
    """
    found: tuple[ModelRunner | GpuRunner | GpuStagedRunner, int, str]
    if accelerator is not None:
        found = _of_device(loaded, ops, accelerator, config, num_blocks, max_model_len, lends, group)
    elif group is not None:
        found = _of_processes(loaded, ops, config, num_blocks, lends, group)
    else:
        kv = ops.allocate_kv(*sizing.kv_geometry(loaded, num_blocks))
        lent = lent_blocks(config, loaded, ops, _block_bytes(ops, kv)) if lends else 0
        swapper, why = swapper_of(config, ops, kv, AtOnce(), config.max_running * blocks_for(max_model_len), lent)
        found = ModelRunner(loaded.decoder, kv, ops.device, swapper), lent, why
    if group is not None:
        group.allocate(num_blocks, found[1], ops, loaded.fingerprint, max_model_len)
    return found


def _of_processes(
    loaded: LoadedModel, ops: Ops, config: EngineConfig, num_blocks: int, lends: bool, group: Group
) -> tuple[ModelRunner, int, str]:
    """Of CPUs."""
    kv = ops.allocate_kv(*sizing.kv_geometry(loaded, num_blocks))
    lent = lent_blocks(config, loaded, ops, group.block_bytes(ops)) if lends else 0
    swapper, why = shared_swapper(group, ops, kv, lent)
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
    loaded.decoder.rotary.reserve(max_model_len)  # graphs hold its address
    kv = ops.allocate_kv(*sizing.kv_geometry(loaded, num_blocks + 1))  # the last is for the padding of graphs
    longest = blocks_for(max_model_len)
    bounds = {
        "max_running": config.max_running,
        "max_model_len": max_model_len,
        "longest_blocks": longest,
        "padding_block": num_blocks,
        "vocab_size": loaded.config.vocab_size,
        "max_drafts": config.speculate_ngram,
    }
    if group is not None and len(group.stages) > 1:
        accelerator = Guarded(accelerator, group)
        line = GpuLine(loaded.decoder, group, accelerator)
        return GpuStagedRunner(line, kv, ops, accelerator, **bounds), 0, _NOT_KEPT
    model: GpuLead | None = None
    lent, swapper, why = 0, None, _NOT_KEPT
    if group is not None:
        model = GpuLead(loaded.decoder, group)
        accelerator = Together(accelerator, group, model)
    else:
        lent = lent_blocks(config, loaded, ops, _block_bytes(ops, kv)) if lends else 0
        swapper, why = swapper_of(config, ops, kv, accelerator, config.max_running * longest, lent)
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


def _block_bytes(ops: Ops, kv: Sequence[torch.Tensor]) -> int:
    return sum(part[0].nbytes for cache in kv for part in ops.kv_parts(cache))
