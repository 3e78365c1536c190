"""Ranks of one process, each in a thread of its own: what they exchange is handed over at barriers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from in_stages import InStages

from motley.kernels.ops import Ops
from motley.replicas.checkpoint.reading.weight_loader import WeightLoader
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.model.decoder import Decoder
from motley.replicas.model.sharding.ranks import Ranks
from motley.replicas.model.sharding.split import shard_for_rank
from motley.replicas.model.sharding.stages import pipeline_stages

T = TypeVar("T")


class ThreadExchange:
    """Counts what it is asked for, on its own rank."""

    def __init__(self, rank: int, barrier: threading.Barrier, tensors: list[torch.Tensor | None]) -> None:
        self.sums = self.gathers = 0
        self._rank, self._barrier, self._tensors = rank, barrier, tensors

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return torch.stack(self._all(x)).sum(0)

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        self.gathers += 1
        parts = self._all(x)
        assert [part.shape[1] for part in parts] == list(widths)
        return torch.cat(parts, dim=1)

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._tensors[self._rank] = x
        self._barrier.wait(30)
        found = [tensor for tensor in self._tensors if tensor is not None]
        self._barrier.wait(30)
        return found


def on_ranks(
    folder: Path,
    size: int,
    make_ops: Callable[[], Ops],
    work: Callable[[Decoder], T],
    layers: Sequence[int] | None = None,
) -> list[T]:
    """`work` on the decoder of each rank, all at once; its results by rank. layers: of stages that each rank has."""
    checkpoint = inspect_checkpoint(folder)
    parts = (
        [shard_for_rank(checkpoint.config, checkpoint.format, rank, size) for rank in range(size)] if size > 1 else []
    )
    stages = pipeline_stages(checkpoint.config.num_layers, layers or (checkpoint.config.num_layers,))
    barrier: threading.Barrier = threading.Barrier(size)
    tensors: list[torch.Tensor | None] = [None] * size

    def rank_of(rank: int) -> T:
        try:
            ops = make_ops()
            ranks = Ranks(parts, rank, ThreadExchange(rank, barrier, tensors)) if parts else None
            decoders = [
                Decoder(
                    checkpoint.config,
                    checkpoint.format,
                    WeightLoader(checkpoint.tensors, ops.device),
                    ops,
                    ranks,
                    stage,
                )
                for stage in stages
            ]
            return work(decoders[0] if layers is None else InStages(decoders))  # type: ignore[arg-type]
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))
