"""Preemption: KV is copied to the host where that and the way back take less time than to compute it again. Pure.

A sequence whose KV comes back has its place in one plan and takes part from the next: the copy is made beside the
step between them, and what comes after the copy can count on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import Allocation, blocks_for
from .host_pool import HostPool
from .protocol import BLOCK_TOKENS
from .sequence import Sequence, State

Pair = tuple[int, int]  # a block of the device and one of the host


@dataclass(frozen=True, slots=True)
class SwapRates:
    """Measured seconds: of a block to the host, of one back, of a prompt's token computed."""

    out_s: float
    in_s: float
    token_s: float

    def favour_copy(self, blocks: int, shared: int, num_tokens: int) -> bool:
        """Of `blocks` blocks the first `shared` stay on the device, as others have them too."""
        there_and_back = blocks * self.out_s + (blocks - shared) * self.in_s
        return there_and_back < (num_tokens - shared * BLOCK_TOKENS) * self.token_s


class Swap:
    """What preemption does with KV. `rates`: None until they are measured; till then all is computed again."""

    def __init__(self, num_blocks: int = 0, rates: SwapRates | None = None) -> None:
        self.pool = HostPool(num_blocks)
        self.rates = rates
        self.swapped = 0  # preemptions since the start, by kind
        self.recomputed = 0
        self._leaving: list[tuple[Sequence, tuple[Pair, ...]]] = []
        self._coming: list[tuple[Sequence, Allocation, tuple[Pair, ...]]] = []

    def preempt(self, sequence: Sequence) -> None:
        """Before it gives up its blocks."""
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
        """Whether KV of it is brought to `allocation`, which begins with what the device still had.

        It gives its blocks of the host up: whoever gets them is copied later.
        """
        copy, found = sequence.host_copy, allocation.prefix_blocks
        if copy is None:
            return False
        wanted = (
            copy.first <= found and copy.num_tokens > found * BLOCK_TOKENS
        )  # else the device has lost what is before
        if wanted:
            grown = allocation.grow(copy.num_tokens)
            assert grown, "admission has checked the room"
            pairs = tuple(zip(allocation.blocks[found:], copy.blocks[found - copy.first :], strict=True))
            self._coming.append((sequence, allocation, pairs))
            sequence.num_launched = copy.num_tokens
        self.drop(sequence)
        return wanted

    def drop(self, sequence: Sequence) -> None:
        """What the host has of it is not wanted any more."""
        if sequence.host_copy is not None:
            sequence.host_copy.close()
            sequence.host_copy = None

    @property
    def leaves(self) -> bool:
        """Whether the plan that is made copies KV to the host."""
        return bool(self._leaving)

    @property
    def comes(self) -> bool:
        """Whether it brings KV back."""
        return bool(self._coming)

    def copies(self) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
        """For the plan that is made: out, and in. One that preempts brings nobody's KV back, so there is never both."""
        out = tuple(pair for _, pairs in self._leaving for pair in pairs)
        into = tuple(pair for _, _, pairs in self._coming for pair in pairs)
        assert not (out and into), "blocks of either would be of both"
        return out, into

    def arrived(self) -> list[Sequence]:
        """Those whose KV came with the last plan, and is to be counted as computed."""
        found = [sequence for sequence, allocation, _ in self._coming if sequence.allocation is allocation]
        self._leaving, self._coming = [], []
        return found

    def failed(self) -> list[Sequence]:
        """The last plan's copies were not made. Those who have a place on the device with nothing in it."""
        for sequence, _ in self._leaving:
            self.drop(sequence)
            self.swapped, self.recomputed = self.swapped - 1, self.recomputed + 1
        return self.arrived()

    def _worthwhile(self, sequence: Sequence, allocation: Allocation) -> bool:
        # What of a prompt's hidden states was summed up is begun anew, with the prompt.
        if self.rates is None or sequence.request.pooling is not None:
            return False
        assert sequence.state is State.RUNNING
        assert sequence.num_computed < sequence.num_tokens, "a token is left to compute"
        return self.rates.favour_copy(blocks_for(sequence.num_computed), allocation.shared, sequence.num_computed)
