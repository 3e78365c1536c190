"""Choice of an engine's runner: on a CPU or on a GPU, for a whole model or for one that is divided among processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ....kernels.contract import DeviceOps
from ....kernels.ops import Ops
from ...engine_config import EngineConfig
from ...errors import InvalidRequest
from ...execution.copier import Copier, CpuCopier
from ...execution.runner import ModelRunner
from ...execution.swapper import Swapper
from ...gpu.accelerator import Accelerator
from ...kv.blocks import blocks_for
from ...loading.model_loader import LoadedModel
from ...model.layers import allocate_kv
from ...offload.device.piecewise_decoder import piecewise_model
from ...parallel.leader.follower_group import FollowerGroup
from ...parallel.leader.leader_model import PipelineLeader, TensorParallelLeader
from ...parallel.leader.parallel_swapper import ParallelSwapper
from ...parallel.leader.pipeline_runner import PipelineRunner
from .prefix_setup import num_lent_blocks
from .swap_setup import build_swapper

if TYPE_CHECKING:
    from ...gpu.gpu_runner import GpuRunner
    from ...parallel.leader.gpu_pipeline_runner import GpuPipelineRunner

__all__ = ["build_runner"]


def build_runner(
    loaded: LoadedModel,
    ops: Ops,
    accelerator: Accelerator | None,
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    lends: bool,
    group: FollowerGroup | None,
) -> tuple[ModelRunner | GpuRunner | GpuPipelineRunner, int, str]:
    """Return the runner, how many of its host blocks are lent to prefixes, and why it has that many for itself.

    accelerator  None: a CPU
    lends        whether host blocks are lent to prefixes, as far as the processes can
    group        processes of which `loaded` is a part; the other processes have allocated their KV when this returns
    """
    found: tuple[ModelRunner | GpuRunner | GpuPipelineRunner, int, str]
    if accelerator is not None:
        found = _build_device_runner(loaded, ops, accelerator, config, num_blocks, max_model_len, lends, group)
    else:
        found = _build_cpu_runner(loaded, ops, config, num_blocks, max_model_len, lends, group)
    if group is not None:
        num_host_blocks = 0 if found[0].swapper is None else found[0].swapper.num_blocks
        group.allocate(num_blocks, num_host_blocks, ops, loaded.fingerprint, max_model_len)
    return found


def _build_cpu_runner(
    loaded: LoadedModel,
    ops: Ops,
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    lends: bool,
    group: FollowerGroup | None,
) -> tuple[ModelRunner, int, str]:
    kv = allocate_kv(ops, loaded.decoder.local.layers, num_blocks)
    swapper, lent, why = _build_swapper(loaded, ops, CpuCopier(), config, kv, max_model_len, lends, group)
    if group is None:
        return ModelRunner(loaded.decoder, kv, ops.device, swapper), lent, why
    if len(group.stages) > 1:
        return PipelineRunner(PipelineLeader(loaded.decoder, group), kv, ops.device, swapper), lent, why
    return ModelRunner(TensorParallelLeader(loaded.decoder, group), kv, ops.device, swapper), lent, why


def _build_device_runner(
    loaded: LoadedModel,
    ops: Ops,
    accelerator: Accelerator,
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    lends: bool,
    group: FollowerGroup | None,
) -> tuple[GpuRunner | GpuPipelineRunner, int, str]:
    from ...gpu.gpu_runner import GpuRunner  # imports Triton, which an engine on a CPU does without
    from ...parallel.leader.gpu_leader import GpuTensorParallelLeader, GuardedAccelerator, SynchronizedAccelerator
    from ...parallel.leader.gpu_pipeline_runner import GpuPipelineLeader, GpuPipelineRunner

    assert isinstance(ops, DeviceOps), "an accelerator's operators choose tokens"
    loaded.decoder.rotary.reserve(max_model_len)  # graphs hold the table's address, so it must not grow
    kv = allocate_kv(ops, loaded.decoder.local.layers, num_blocks + 1)  # the last is for the padding of graphs
    longest = blocks_for(max_model_len)
    bounds: dict[str, int] = {
        "max_running": config.max_running,
        "max_model_len": max_model_len,
        "longest_blocks": longest,
        "padding_block": num_blocks,
        "vocab_size": loaded.config.vocab_size,
        "max_drafts": config.speculate_ngram,
    }
    swapper, lent, why = _build_swapper(loaded, ops, accelerator, config, kv, max_model_len, lends, group)
    if group is not None and len(group.stages) > 1:
        accelerator = GuardedAccelerator(accelerator, group)
        line = GpuPipelineLeader(loaded.decoder, group, accelerator)
        return GpuPipelineRunner(line, kv, ops, accelerator, swapper=swapper, **bounds), lent, why
    model: GpuTensorParallelLeader | None = None
    if group is not None:
        model = GpuTensorParallelLeader(loaded.decoder, group)
        accelerator = SynchronizedAccelerator(accelerator, group, model)
    runner = GpuRunner(
        model or piecewise_model(loaded.decoder, accelerator),
        kv,
        ops,
        accelerator,
        **bounds,
        graphs=config.graphs,
        swapper=swapper,
    )
    return runner, lent, why


def _build_swapper(
    loaded: LoadedModel,
    ops: Ops,
    copier: Copier,
    config: EngineConfig,
    kv: Sequence[torch.Tensor],
    max_model_len: int,
    lends: bool,
    group: FollowerGroup | None,
) -> tuple[Swapper | None, int, str]:
    """Return the swapper, the blocks lent to prefixes, and why. copier: for this process's own part of KV."""
    if group is not None and (why := group.host_kv_refusal):
        if config.swap_memory_bytes:
            raise InvalidRequest(f"swap_memory_bytes: KV is not kept on the host: {why}", param="swap_memory_bytes")
        return None, 0, f"by computing again: {why}"
    parts = [part for cache in kv for part in ops.kv_parts(cache)]
    block_bytes = sum(part[0].nbytes for part in parts) if group is None else group.block_bytes(ops)
    lent = num_lent_blocks(config, loaded, ops, block_bytes) if lends else 0

    def make(blocks: int) -> Swapper:
        return Swapper(parts, copier, blocks) if group is None else ParallelSwapper(parts, copier, blocks, group)

    max_blocks = config.max_running * blocks_for(max_model_len)
    swapper, why = build_swapper(config, ops, block_bytes, make, copier, max_blocks, lent)
    return swapper, lent, why
