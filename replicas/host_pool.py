"""Blocks of the host's memory for KV that has left the device. Pure bookkeeping.

A block is free or part of one copy; when nobody waits, all are free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .blocks import blocks_for


class HostPool:
    """`total`: 0 where nothing is kept on the host. first: number of the first block."""

    def __init__(self, num_blocks: int = 0, first: int = 0) -> None:
        self.total = num_blocks
        self._first = first
        self._free = list(range(first, first + num_blocks))

    @property
    def available(self) -> int:
        return len(self._free)

    def open(self, num_tokens: int) -> HostCopy | None:
        """Room for so many tokens; None: there is none."""
        count = blocks_for(num_tokens)
        if count > len(self._free):
            return None
        return HostCopy(self, num_tokens, self.take(count))

    def take(self, count: int) -> list[int]:
        """So many of those that are available."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)

    def check_idle(self) -> None:
        """Assert that every block is free, once."""
        every = list(range(self._first, self._first + self.total))
        assert sorted(self._free) == every, f"{self.total - len(self._free)} blocks still on the host"


class LentPool(HostPool):
    """Blocks of the host that others write by themselves: those given back may still be read by a copy."""

    def __init__(self, num_blocks: int = 0, first: int = 0) -> None:
        super().__init__(num_blocks, first)
        self.left: list[int] = []  # given back, and not known to be free

    def give_back(self, blocks: Iterable[int]) -> None:
        self.left.extend(blocks)

    def free(self, blocks: Iterable[int]) -> None:
        """Nothing reads or writes them any more."""
        super().give_back(blocks)


@dataclass(eq=False, slots=True)
class HostCopy:
    """KV of a sequence's first `num_tokens` tokens, on the host: its blocks go back when it is closed.

    first: the block of the sequence that `blocks` begin with; those before it were on the device.
    """

    pool: HostPool
    num_tokens: int
    blocks: list[int]
    first: int = 0

    def close(self) -> None:
        self.pool.give_back(self.blocks)
        self.blocks = []
