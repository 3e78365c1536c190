"""KV blocks in the host's memory of a divided model, on their way to and from a prefix store.

Each process copies between its KV and its own part of such a block, in the order of steps. These parts are memory that
it shares with the first process, which alone reads, opens, seals and writes records. So a record is found by all ranks
or by none, under one deadline, and no other process has the fleet's secret or a connection to the store.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ....kernels.contract import MetaOpsProvider
from ....kernels.ops import Ops
from ...execution.copier import CpuCopier
from ...execution.swapper import Swapper
from ...kv.store.host_kv import HostKv, PayloadSlice, RecordPayloads
from ...kv.store.sealed_record import Geometry
from ...model.model_config import ModelConfig
from ...model.sharding.split import TensorShard
from ...model.sharding.stages import PipelineStage
from ...quantization.weight_format import Span

__all__ = ["KvShare", "ParallelHostRecords", "SharedHostMemory", "kv_layout_mismatch", "kv_shares"]


@dataclass(frozen=True, slots=True)
class KvShare:
    """Part of a KV block that one process has.

    layers  half-open range of the model's layers
    heads   half-open range of the model's KV heads
    keeps   whether its heads are written to a store from this process: with more ranks than KV heads some ranks have
            the same head, and the first of them writes it
    """

    layers: Span
    heads: Span
    keeps: bool

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    def block(self, ops: Ops, head_dim: int) -> list[torch.Tensor]:
        """Return one KV block of this process as views [1, ...] of its parts, of which only types and shapes matter.

        ops  possibly operators of another process with other heads; on a GPU they remember the heads of the KV that
             they serve, so that a separate copy allocates the block
        """
        apart = ops.for_meta_device() if isinstance(ops, MetaOpsProvider) else ops
        kv = apart.allocate_kv(self.num_layers, 1, self.heads[1] - self.heads[0], head_dim)
        return [part for cache in kv for part in apart.kv_parts(cache)]

    def of(self, payloads: RecordPayloads) -> PayloadSlice:
        return payloads.portion(slice(*self.heads), slice(*self.layers))


def kv_layout_mismatch(processes: Iterable[tuple[torch.dtype, bool]]) -> str:
    """Return the reason why KV blocks of these processes have unlike layouts on the host; empty if they are alike.

    processes  for each process the dtype that it computes in, and whether it is on a GPU
    """
    kinds = {f"{str(dtype).removeprefix('torch.')} on {'GPUs' if on_gpu else 'CPUs'}" for dtype, on_gpu in processes}
    return f"the processes of the model have it in {' and '.join(sorted(kinds))}" if len(kinds) > 1 else ""


def kv_shares(config: ModelConfig, stages: Sequence[PipelineStage], parts: Sequence[TensorShard]) -> list[KvShare]:
    """Return the share of a KV block of every process, stage by stage and within each by rank.

    parts  parts of the ranks; empty if each stage has one
    """
    heads = [part.config.layers[0].attention.kv_heads.own for part in parts] or [(0, config.kv_shape[0])]
    keeps = [own not in heads[:rank] for rank, own in enumerate(heads)]
    return [KvShare(stage.layers, *each) for stage in stages for each in zip(heads, keeps, strict=True)]


class SharedHostMemory:
    """Memory of a file that processes share.

    The descriptor may be closed after construction.

    memory  all of it, as uint8
    """

    def __init__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        self.memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        self._taken = 0

    def staging(self, size: int) -> torch.Tensor:
        """Return the next `size` bytes of the shared memory, as a `Swapper` asks for memory of the host."""
        first, self._taken = self._taken, self._taken + size
        assert self._taken <= len(self.memory)
        return self.memory[first : self._taken]


class ParallelHostRecords:
    """Blocks in the host's memory of all processes together. Implements `HostRecords`.

    shares  part of a block that each process has
    own     the first process's swapper
    others  host memory of each of the other processes
    """

    def __init__(
        self, shares: Sequence[KvShare], own: Swapper, others: Sequence[SharedHostMemory], ops: Ops, geometry: Geometry
    ) -> None:
        self._geometry = geometry
        swappers = [own]
        for share, host in zip(shares[1:], others, strict=True):
            # One block of KV is enough to tell the layout that this process's blocks have on the host.
            block = [torch.empty(part.shape, dtype=part.dtype) for part in share.block(ops, geometry.head_dim)]
            swappers.append(Swapper(block, CpuCopier(), own.num_blocks, host.staging))
        self._places = [
            (share, HostKv(swapper.slabs(), ops.kv_vectors, replace(geometry, layers=share.num_layers)))
            for share, swapper in zip(shares, swappers, strict=True)
        ]

    def allocate_payloads(self) -> RecordPayloads:
        return RecordPayloads(self._geometry, self._geometry.heads)

    def pack(self, blocks: Sequence[int], payloads: RecordPayloads) -> bool:
        return all(kv.pack(blocks, share.of(payloads)) for share, kv in self._places if share.keeps)

    def unpack(self, payloads: RecordPayloads, blocks: Sequence[int]) -> bool:
        return all(kv.unpack(share.of(payloads), blocks) for share, kv in self._places)
