"""Pool of host memory blocks for KV that has left the device. Pure bookkeeping.

A block is free or part of one copy; when no sequence waits, all are free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .blocks import blocks_for


class HostBlockPool:
    """Blocks of host memory for KV. `total`: 0 where no KV is kept on the host. first: number of the first block."""

    def __init__(self, num_blocks: int = 0, first: int = 0) -> None:
        self.total = num_blocks
        self._first = first
        self._free = list(range(first, first + num_blocks))

    @property
    def available(self) -> int:
        return len(self._free)

    def open(self, num_tokens: int) -> HostKvCopy | None:
        """Allocate blocks for `num_tokens` tokens of KV; None if too few blocks are free."""
        count = blocks_for(num_tokens)
        if count > len(self._free):
            return None
        return HostKvCopy(self, num_tokens, self.take(count))

    def take(self, count: int) -> list[int]:
        """Take `count` of the available blocks."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)

    def check_idle(self) -> None:
        """Assert that every block of the host's pool is free, and listed once."""
        every = list(range(self._first, self._first + self.total))
        assert sorted(self._free) == every, f"{self.total - len(self._free)} blocks still on the host"


class LentBlockPool(HostBlockPool):
    """Pool of host blocks that other threads read and write: a returned block may still be read by a copy."""

    def __init__(self, num_blocks: int = 0, first: int = 0) -> None:
        super().__init__(num_blocks, first)
        self.left: list[int] = []  # blocks that were given back, and may still be in use by a copy

    def give_back(self, blocks: Iterable[int]) -> None:
        self.left.extend(blocks)

    def free(self, blocks: Iterable[int]) -> None:
        """Make blocks available again, since no copy reads or writes them any more."""
        super().give_back(blocks)


@dataclass(eq=False, slots=True)
class HostKvCopy:
    """KV of a sequence's first `num_tokens` tokens in host memory; closing it gives its blocks back.

    first: index of the sequence's block that `blocks` begin with; the blocks before it were on the device.
    """

    pool: HostBlockPool
    num_tokens: int
    blocks: list[int]
    first: int = 0

    def close(self) -> None:
        self.pool.give_back(self.blocks)
        self.blocks = []
