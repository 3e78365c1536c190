"""What each process of a divided model would hold, and what would fit: told before anything is loaded.

The loader is asked, with a rank's and a stage's part of tensors that have shapes and no values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..blocks import blocks_for
from ..checkpoint import Checkpoint
from ..cores import usable_cores
from ..decoder import Decoder
from ..errors import InvalidRequest
from ..fit import Asked, Place, host_blocks, outlined, parts_of
from ..gpu.swapper import pinned_bytes
from ..host_memory import free_memory
from ..memory import KvBudget, Parts, cpu_kv_budget, kv_budget
from ..protocol import BLOCK_TOKENS
from .costs import best_layers
from .host import unlike_kv
from .places import account_of
from .ranks import Ranks
from .split import Split, split
from .stages import Stage, stages_of

__all__ = ["Divided", "Division", "Process", "divided"]


@dataclass(frozen=True, slots=True)
class Division:
    """ranks: of each stage; layers: of each stage, None: so that the slowest takes the least."""

    ranks: int = 1
    stages: int = 1
    layers: tuple[int, ...] | None = None

    @property
    def processes(self) -> int:
        return self.ranks * self.stages


@dataclass(frozen=True, slots=True)
class Process:
    """Those of a stage's ranks that hold alike; decoder: of one of them, without values."""

    place: Place
    stage: Stage
    ranks: tuple[int, ...]
    decoder: Decoder
    parts: Parts


@dataclass(frozen=True, slots=True)
class Divided:
    """What becomes of a divided model where each process has a GPU of its stage's kind, or its share of one CPU.

    places     of each stage
    processes  stage by stage; none where it cannot be divided so, or held: `refused` says why
    layers     of each stage, and why so many
    missing    bytes, of the process that misses most
    """

    places: Sequence[Place]
    division: Division
    processes: Sequence[Process] = ()
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
        """Whether some are on GPUs, and others on a CPU."""
        return len({place.device is None for place in self.places}) > 1


def divided(checkpoint: Checkpoint, places: Sequence[Place], asked: Asked, division: Division) -> Divided:
    """Nothing is loaded; of the checkpoint no tensor is read. places: of each stage; a CPU is the same one."""
    assert len(places) == division.stages
    try:
        kinds = unlike_kv((place.ops().dtype, place.device is not None) for place in places)
        if kinds and asked.swap_memory_bytes:
            raise InvalidRequest(f"swap_memory_bytes: KV is not kept on the host: {kinds}", param="swap_memory_bytes")
        asked = replace(asked, shares=False, swap_memory_bytes=0) if kinds else asked
        layers, why = _layers(checkpoint, places, asked, division)
        processes = _processes(checkpoint, places, asked, division.ranks, layers)
    except (ValueError, InvalidRequest) as error:
        return Divided(places, division, refused=str(error))
    blocks, missing = _room(processes)
    if not kinds:
        processes = _with_host(checkpoint, processes, asked, blocks)
    return Divided(
        places,
        division,
        processes,
        layers,
        why,
        kv_tokens=blocks * BLOCK_TOKENS,
        context=min(blocks // asked.batch * BLOCK_TOKENS, checkpoint.config.max_model_len),
        batch=blocks // blocks_for(asked.context),
        fits=not missing and blocks >= asked.batch * blocks_for(asked.context),
        missing=missing,
    )


def _layers(
    checkpoint: Checkpoint, places: Sequence[Place], asked: Asked, division: Division
) -> tuple[tuple[int, ...], str]:
    """As the engine would choose them. Raises InvalidRequest."""
    if division.layers is not None:
        return division.layers, "as asked for"
    if division.stages == 1:
        return (checkpoint.config.num_layers,), "there is one stage"
    computing = sum(place.device is None for place in places) * division.ranks
    threads = max(1, usable_cores() // max(1, computing))
    by_place = {place.name: account_of(checkpoint, place, threads=threads) for place in places}
    accounts = [by_place[place.name] for place in places for _ in range(division.ranks)]
    tokens = BLOCK_TOKENS if _on_cpu(places) else asked.context * asked.batch
    return best_layers(checkpoint.config, accounts, division.ranks, tokens)


def _processes(
    checkpoint: Checkpoint, places: Sequence[Place], asked: Asked, size: int, layers: Sequence[int]
) -> list[Process]:
    """Raises InvalidRequest where the model cannot be divided so, ValueError for what the device cannot hold."""
    config, format, tensors = checkpoint.config, checkpoint.format, checkpoint.tensors
    parts = [split(config, format, rank, size) for rank in range(size)] if size > 1 else []
    found = []
    for place, stage in zip(places, stages_of(config.num_layers, layers), strict=True):
        for alike in _alike(parts):
            ranks = Ranks(parts, alike[0], _Silent()) if parts else None
            decoder = outlined(config, format, tensors, place.ops(), ranks, stage)
            found.append(Process(place, stage, alike, decoder, parts_of(decoder, asked)))
    return found


def _alike(parts: Sequence[Split]) -> list[tuple[int, ...]]:
    """Ranks with as much of everything. The first is one of its own: it has biases of sums, and chooses tokens."""
    if not parts:
        return [(0,)]
    kinds: dict[tuple[object, ...], list[int]] = {}
    for part in parts:
        spans = (part.heads, part.kv_heads, part.inner, part.tokens)
        kinds.setdefault((part.rank == 0, *(last - first for first, last in spans)), []).append(part.rank)
    return [tuple(ranks) for ranks in kinds.values()]


def _room(processes: Sequence[Process]) -> tuple[int, int]:
    """Blocks of KV, each of all processes together, and what is missing. Processes of a CPU share its memory."""
    on_cpu = [(len(each.ranks), each) for each in processes if each.place.device is None]
    found = [(_budget(each), each.parts.kv_block) for each in processes if each.place.device is not None]
    if on_cpu:
        loaded = sum(count * each.parts.loaded for count, each in on_cpu)
        budget = cpu_kv_budget(on_cpu[0][1].place.free - loaded)
        found.append((budget, sum(count * each.parts.kv_block for count, each in on_cpu)))
    return min(budget.blocks(block) for budget, block in found), max(budget.missing for budget, _ in found)


def _on_cpu(places: Sequence[Place]) -> bool:
    return all(place.device is None for place in places)


def _with_host(checkpoint: Checkpoint, processes: Sequence[Process], asked: Asked, blocks: int) -> list[Process]:
    """Each with its part of what the engine takes of the host for KV; of a host that is not here, as if it had room.

    The first process's part is pinned as torch does it, that of each other is as large as it must be.
    """
    place, block = processes[0].place, sum(len(each.ranks) * each.parts.kv_block for each in processes)
    on_gpu = place.device is not None
    free = place.free if not on_gpu else free_memory() if place.at_hand else sys.maxsize
    kept, lent = host_blocks(asked, checkpoint.config, place.ops(), block, blocks, free, on_gpu=on_gpu)
    found = []
    for number, each in enumerate(processes):
        own = each.parts.kv_block
        taken, host = (
            pinned_bytes(count, own) if on_gpu and not number else count * own for count in (kept + lent, kept)
        )
        found.append(replace(each, parts=replace(each.parts, host=host, buffers=taken - host)))
    return found


def _budget(process: Process) -> KvBudget:
    """Of each of those on GPUs."""
    place, parts = process.place, process.parts
    return kv_budget(place.free - parts.loaded, place.total, parts)


class _Silent:
    """The exchange of a rank that computes nothing."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("an outline exchanges nothing")

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError("an outline exchanges nothing")
