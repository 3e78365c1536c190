"""Copies of the bytes of KV blocks from a device to the host and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from .copier import Copier

BlockPair = tuple[int, int]  # a block of the device and one of the host


class StagedBlockCopy:
    """Copies through staging memory of the device, where blocks are assembled, at most `count` at a time.

    parts  parts of the device's KV, [blocks, numbers of one], which lie one after the other in a block of the host
    slabs  the host's memory, uint8 [blocks, bytes of one] each; all but the last have the same length
    """

    def __init__(
        self, copier: Copier, count: int, parts: Sequence[torch.Tensor], slabs: Sequence[torch.Tensor]
    ) -> None:
        self._copier, self._parts, self._slabs, self._per_slab = copier, parts, slabs, len(slabs[0]) if slabs else 1
        ends = list(itertools.accumulate(part[0].nbytes for part in parts))
        self._staged = staged = torch.empty(count, ends[-1], dtype=torch.uint8, device=copier.device)
        self._staged_parts = [
            staged[:, start:end].view(part.dtype) for part, start, end in zip(parts, [0, *ends], ends, strict=False)
        ]

    def out(self, chunk: Sequence[BlockPair]) -> None:
        blocks = self._blocks(chunk)
        for part, staged in zip(self._parts, self._staged_parts, strict=True):
            staged[: len(chunk)].copy_(part.index_select(0, blocks))
        for row, (_, block) in enumerate(chunk):
            self._host(block).copy_(self._staged[row], non_blocking=True)

    def back(self, chunk: Sequence[BlockPair]) -> None:
        blocks = self._blocks(chunk)
        for row, (_, block) in enumerate(chunk):
            self._staged[row].copy_(self._host(block), non_blocking=True)
        for part, staged in zip(self._parts, self._staged_parts, strict=True):
            part.index_copy_(0, blocks, staged[: len(chunk)])

    def _blocks(self, chunk: Sequence[BlockPair]) -> torch.Tensor:
        return self._copier.moved(torch.tensor([block for block, _ in chunk], dtype=torch.int64))

    def _host(self, block: int) -> torch.Tensor:
        slab, row = divmod(block, self._per_slab)
        return self._slabs[slab][row]


class DirectBlockCopy:
    """Copies where the device's memory is the host's: as bytes, in the calling thread.

    torch's copies of a few blocks would use its other threads and wait for each; on a busy machine that takes a hundred
    times as long as the copy. `StagedBlockCopy` describes parts and slabs.
    """

    def __init__(self, parts: Sequence[torch.Tensor], slabs: Sequence[torch.Tensor]) -> None:
        self._parts = [part.view(torch.uint8).numpy() for part in parts]
        self._slabs, self._per_slab = [slab.numpy() for slab in slabs], len(slabs[0]) if slabs else 1
        ends = list(itertools.accumulate(part.shape[1] for part in self._parts))
        self._places = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def out(self, chunk: Sequence[BlockPair]) -> None:
        for device, slab, row in self._rows(chunk):
            for part, place in zip(self._parts, self._places, strict=True):
                self._slabs[slab][row, place] = part[device]

    def back(self, chunk: Sequence[BlockPair]) -> None:
        for device, slab, row in self._rows(chunk):
            for part, place in zip(self._parts, self._places, strict=True):
                part[device] = self._slabs[slab][row, place]

    def _rows(self, chunk: Sequence[BlockPair]) -> Iterator[tuple[int, int, int]]:
        """Yield for each pair the block of the device, and the slab and the row in it of the host's block."""
        for device, block in chunk:
            yield device, *divmod(block, self._per_slab)
