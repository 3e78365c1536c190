"""Preemption: KV is copied to host memory where that and the way back take less time than computing it again. Pure.

A sequence whose KV is copied back has its place in one plan and takes part from the next one on: the copy runs beside
the step between them, and whatever is launched after the copy can count on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kv.blocks import Allocation, blocks_for
from ...kv.host_blocks import HostBlockPool
from ...types import BLOCK_TOKENS
from ..sequence import Sequence, SequenceState

BlockPair = tuple[int, int]  # a block of the device and one of the host


@dataclass(frozen=True, slots=True)
class SwapRates:
    """Measured seconds: to copy a block to the host, to copy one back, and to compute one prompt token."""

    out_s: float
    in_s: float
    token_s: float

    def prefers_copy(self, blocks: int, shared: int, num_tokens: int) -> bool:
        """Return whether copying takes less time than computing again. The first `shared` of the `blocks` blocks need
        not be copied back: they stay on the device, as other sequences hold them too.
        """
        there_and_back = blocks * self.out_s + (blocks - shared) * self.in_s
        return there_and_back < (num_tokens - shared * BLOCK_TOKENS) * self.token_s


class SwapPlanner:
    """Host memory for the KV of preempted sequences. `rates`: None until measured; until then all KV is computed
    again.
    """

    def __init__(self, num_blocks: int = 0, rates: SwapRates | None = None) -> None:
        self.pool = HostBlockPool(num_blocks)
        self.rates = rates
        self.swapped = 0  # preemptions since the start, by kind
        self.recomputed = 0
        self._leaving: list[tuple[Sequence, tuple[BlockPair, ...]]] = []
        self._coming: list[tuple[Sequence, Allocation, tuple[BlockPair, ...]]] = []

    def preempt(self, sequence: Sequence) -> None:
        """Choose what happens to a sequence's KV (copied to the host, or dropped). Called before the sequence gives up
        its blocks.
        """
        allocation, num_tokens = sequence.allocation, sequence.num_computed
        assert allocation is not None
        copy = self.pool.open(num_tokens) if self._worthwhile(sequence, allocation) else None
        if copy is None:
            self.recomputed += 1
            return
        self.swapped += 1
        sequence.host_copy = copy
        self._leaving.append((sequence, tuple(zip(allocation.blocks, copy.blocks, strict=False))))

    def resume(self, sequence: Sequence, allocation: Allocation) -> bool:
        """Copy a sequence's KV from the host to `allocation`, which begins with the blocks that the device still had.

        Returns whether KV is copied. The sequence's host blocks are freed at once: a later copy into them is made after
        this one.
        """
        copy, found = sequence.host_copy, allocation.prefix_blocks
        if copy is None:
            return False
        wanted = (
            copy.first <= found and copy.num_tokens > found * BLOCK_TOKENS
        )  # else the device has lost the blocks before the copy
        if wanted:
            grown = allocation.grow(copy.num_tokens)
            assert grown, "admission has checked the room"
            pairs = tuple(zip(allocation.blocks[found:], copy.blocks[found - copy.first :], strict=True))
            self._coming.append((sequence, allocation, pairs))
            sequence.num_launched = copy.num_tokens
        self.drop(sequence)
        return wanted

    def drop(self, sequence: Sequence) -> None:
        """Free a sequence's KV in host memory, if it has any."""
        if sequence.host_copy is not None:
            sequence.host_copy.close()
            sequence.host_copy = None

    @property
    def swaps_out(self) -> bool:
        """Whether the plan that is being made copies KV to the host."""
        return bool(self._leaving)

    @property
    def swaps_in(self) -> bool:
        """Whether the plan that is being made copies KV back to the device."""
        return bool(self._coming)

    def copies(self) -> tuple[tuple[BlockPair, ...], tuple[BlockPair, ...]]:
        """Return the copies of the plan that is being made: to the host, and back. There are never both, since a plan
        that preempts brings no KV back.
        """
        out = tuple(pair for _, pairs in self._leaving for pair in pairs)
        into = tuple(pair for _, _, pairs in self._coming for pair in pairs)
        assert not (out and into), "blocks of either would be of both"
        return out, into

    def arrived(self) -> list[Sequence]:
        """Return the sequences whose KV was copied back with the last plan, and now counts as computed."""
        found = [sequence for sequence, allocation, _ in self._coming if sequence.allocation is allocation]
        self._leaving, self._coming = [], []
        return found

    def failed(self) -> list[Sequence]:
        """Handle that the copies of the last plan failed; return the sequences whose blocks on the device were not
        filled.
        """
        for sequence, _ in self._leaving:
            self.drop(sequence)
            self.swapped, self.recomputed = self.swapped - 1, self.recomputed + 1
        return self.arrived()

    def _worthwhile(self, sequence: Sequence, allocation: Allocation) -> bool:
        # A pooled request begins again with its prompt, since the sum of hidden states so far is not kept.
        if self.rates is None or sequence.request.pooling is not None:
            return False
        assert sequence.state is SequenceState.RUNNING
        assert sequence.num_computed < sequence.num_tokens, "a token is left to compute"
        return self.rates.prefers_copy(blocks_for(sequence.num_computed), allocation.shared, sequence.num_computed)
