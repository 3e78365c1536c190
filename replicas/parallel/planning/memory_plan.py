"""Memory plan of a divided model: what each process would hold, and whether it would fit, before anything is loaded.

The loader is run for each rank and stage with tensors that have shapes and no values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...capacity.device_fit import FitWorkload, TargetDevice, build_meta_decoder, host_kv_blocks, memory_parts
from ...errors import InvalidRequest
from ...execution.swapper import pinned_bytes
from ...host.cpu_cores import usable_cores
from ...host.host_memory import free_memory
from ...kv.blocks import blocks_for
from ...kv.memory_budget import KvBudget, MemoryParts, cpu_kv_budget, kv_budget
from ...model.checkpoint_inspection import Checkpoint
from ...model.decoder import Decoder
from ...model.sharding.ranks import Ranks
from ...model.sharding.split import TensorShard, shard_for_rank
from ...model.sharding.stages import PipelineStage, check_stages, pipeline_stages
from ...types import BLOCK_TOKENS
from ..transport.shared_host_kv import kv_layout_mismatch
from .device_report import device_report
from .layer_assignment import best_layers

__all__ = ["ParallelLayout", "ParallelMemoryPlan", "PlannedProcess", "plan_parallel_memory"]


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How a model is to be divided.

    ranks   tensor-parallel ranks of each stage
    stages  pipeline stages
    layers  layers of each stage; None to choose them so that the slowest stage takes the least time
    """

    ranks: int = 1
    stages: int = 1
    layers: tuple[int, ...] | None = None

    @property
    def processes(self) -> int:
        return self.ranks * self.stages


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """Ranks of one pipeline stage that take equally much memory, in the memory plan of a divided model.

    place    device of the stage
    ranks    numbers of these ranks
    decoder  the part of one of them, without values
    parts    its bytes by kind
    """

    place: TargetDevice
    stage: PipelineStage
    ranks: tuple[int, ...]
    decoder: Decoder
    parts: MemoryParts


@dataclass(frozen=True, slots=True)
class ParallelMemoryPlan:
    """Memory plan of a divided model whose processes have a GPU of their stage's kind each, or a share of one CPU.

    places     device of each stage
    processes  stage by stage; empty where the model cannot be divided or held so, for the reason in `refused`
    layers     layers of each stage
    why        reason for these layers
    missing    bytes that the process lacks that lacks most
    """

    places: Sequence[TargetDevice]
    division: ParallelLayout
    processes: Sequence[PlannedProcess] = ()
    layers: tuple[int, ...] = ()
    why: str = ""
    kv_tokens: int = 0
    context: int = 0
    batch: int = 0
    fits: bool = False
    missing: int = 0
    refused: str = ""

    @property
    def mixed(self) -> bool:
        """Whether some of the model's stages are on GPUs and others on a CPU."""
        return len({place.device is None for place in self.places}) > 1


def plan_parallel_memory(
    checkpoint: Checkpoint, places: Sequence[TargetDevice], workload: FitWorkload, division: ParallelLayout
) -> ParallelMemoryPlan:
    """Return the memory plan of a divided model. Nothing is loaded, and no tensor of the checkpoint is read.

    places  device of each stage; stages on a CPU share the same one
    """
    assert len(places) == division.stages
    try:
        check_stages(checkpoint.config.num_layers, division.stages, division.layers)
        kinds = kv_layout_mismatch((place.ops().dtype, place.device is not None) for place in places)
        if kinds and workload.swap_memory_bytes:
            raise InvalidRequest(
                f"swap_memory_bytes: it is not accepted where the processes' KV differs: {kinds}",
                param="swap_memory_bytes",
            )
        workload = replace(workload, shares=False, swap_memory_bytes=0) if kinds else workload
        layers, why = _layers(checkpoint, places, workload, division)
        processes = _processes(checkpoint, places, workload, division.ranks, layers)
    except (ValueError, InvalidRequest) as error:
        return ParallelMemoryPlan(places, division, refused=str(error))
    blocks, missing = _kv_blocks(processes)
    if not kinds:
        processes = _add_host_memory(checkpoint, processes, workload, blocks)
    return ParallelMemoryPlan(
        places,
        division,
        processes,
        layers,
        why,
        kv_tokens=blocks * BLOCK_TOKENS,
        context=min(blocks // workload.batch * BLOCK_TOKENS, checkpoint.config.max_model_len),
        batch=blocks // blocks_for(workload.context),
        fits=not missing and blocks >= workload.batch * blocks_for(workload.context),
        missing=missing,
    )


def _layers(
    checkpoint: Checkpoint, places: Sequence[TargetDevice], workload: FitWorkload, division: ParallelLayout
) -> tuple[tuple[int, ...], str]:
    """Return the layers of each stage and the reason, as the engine would choose them. Raises InvalidRequest."""
    if division.layers is not None:
        return division.layers, "as asked for"
    if division.stages == 1:
        return (checkpoint.config.num_layers,), "there is one stage"
    computing = sum(place.device is None for place in places) * division.ranks
    threads = max(1, usable_cores() // max(1, computing))
    by_place = {place.name: device_report(checkpoint, place, threads=threads) for place in places}
    accounts = [by_place[place.name] for place in places for _ in range(division.ranks)]
    tokens = BLOCK_TOKENS if _on_cpu(places) else workload.context * workload.batch
    return best_layers(checkpoint.config, accounts, division.ranks, tokens)


def _processes(
    checkpoint: Checkpoint, places: Sequence[TargetDevice], workload: FitWorkload, size: int, layers: Sequence[int]
) -> list[PlannedProcess]:
    """Return the processes with their parts of the model.

    Raises InvalidRequest where the model cannot be divided so, and ValueError for what the device cannot hold.
    """
    config, format, tensors = checkpoint.config, checkpoint.format, checkpoint.tensors
    parts = [shard_for_rank(config, format, rank, size) for rank in range(size)] if size > 1 else []
    found = []
    for place, stage in zip(places, pipeline_stages(config.num_layers, layers), strict=True):
        for alike in _group_alike_ranks(parts):
            ranks = Ranks(parts, alike[0], _NullExchange()) if parts else None
            decoder = build_meta_decoder(config, format, tensors, place.ops(), ranks, stage)
            found.append(PlannedProcess(place, stage, alike, decoder, memory_parts(decoder, workload)))
    return found


def _group_alike_ranks(parts: Sequence[TensorShard]) -> list[tuple[int, ...]]:
    """Group the ranks that hold equally much of everything.

    The first rank is a group of its own, since it alone has the biases of sums and samples tokens.
    """
    if not parts:
        return [(0,)]
    kinds: dict[tuple[object, ...], list[int]] = {}
    for part in parts:
        shapes = [linear.shape for plan in part.config.layers for linear in plan.specs]
        kinds.setdefault((part.rank == 0, *shapes, part.tokens[1] - part.tokens[0]), []).append(part.rank)
    return [tuple(ranks) for ranks in kinds.values()]


def _kv_blocks(processes: Sequence[PlannedProcess]) -> tuple[int, int]:
    """Return how many blocks of KV all processes together have memory for, and how many bytes are missing in the one
    that lacks most. Processes on a CPU share its memory.
    """
    on_cpu = [(len(each.ranks), each) for each in processes if each.place.device is None]
    found = [(_budget(each), each.parts.kv_block) for each in processes if each.place.device is not None]
    if on_cpu:
        loaded = sum(count * each.parts.loaded for count, each in on_cpu)
        budget = cpu_kv_budget(on_cpu[0][1].place.free - loaded)
        found.append((budget, sum(count * each.parts.kv_block for count, each in on_cpu)))
    return min(budget.blocks(block) for budget, block in found), max(budget.missing for budget, _ in found)


def _on_cpu(places: Sequence[TargetDevice]) -> bool:
    return all(place.device is None for place in places)


def _add_host_memory(
    checkpoint: Checkpoint, processes: Sequence[PlannedProcess], workload: FitWorkload, blocks: int
) -> list[PlannedProcess]:
    """Return the processes with their parts of the host memory that the engine takes for KV.

    A host that is not this one is taken to have enough memory. The first process's part is pinned as torch does it,
    which rounds it up; those of the others have exactly the size that they need.
    """
    place, block = processes[0].place, sum(len(each.ranks) * each.parts.kv_block for each in processes)
    on_gpu = place.device is not None
    free = place.free if not on_gpu else free_memory() if place.at_hand else sys.maxsize
    swap_blocks, lent = host_kv_blocks(workload, checkpoint.config, place.ops(), block, blocks, free, on_gpu=on_gpu)
    found = []
    for number, each in enumerate(processes):
        own = each.parts.kv_block
        taken, host = (
            pinned_bytes(count, own) if on_gpu and not number else count * own
            for count in (swap_blocks + lent, swap_blocks)
        )
        found.append(replace(each, parts=replace(each.parts, host=host, buffers=taken - host)))
    return found


def _budget(process: PlannedProcess) -> KvBudget:
    """Return the memory budget of each of the process's ranks, which are on GPUs."""
    place, parts = process.place, process.parts
    return kv_budget(place.free - parts.loaded, place.total, parts)


class _NullExchange:
    """Exchange of a rank that computes nothing."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(
            "a model that is only planned (on the meta device) must not exchange tensors with other ranks"
        )

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError(
            "a model that is only planned (on the meta device) must not exchange tensors with other ranks"
        )
