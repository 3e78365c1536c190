"""The engine's scheduler for virtual time: what decodes is advanced all at once; a step costs what changes in it.

Sequences that take one token in every step, whatever else happens, are counted as a whole: how many they are, how long
together, which of them need a block in which step, and which ends next. Everything else, and they too once KV is
scarce, is planned by the engine's own scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from ..blocks import BlockPool, blocks_for
from ..plan import PlanItem
from ..protocol import BLOCK_TOKENS
from ..scheduler import Scheduler
from ..sequence import Sequence

__all__ = ["Steady", "SteadyScheduler"]


class Steady:
    """Sequences that have `offset + steps` tokens each: one more with every step that all of them take.

    The step that is to come writes the KV of the last of these tokens. One that has 16 n + 1 of them needs a block for
    it, and has just filled the one before: sequences are kept by the step, modulo 16, in which that is so.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._offsets = 0  # of all, together
        self._by_phase: list[list[Sequence]] = [[] for _ in range(BLOCK_TOKENS)]
        self._ends: list[tuple[int, int, int, Sequence]] = []  # by the step, and by rank

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def context(self) -> int:
        """Tokens of all of them."""
        return self._offsets + len(self) * self.steps

    @property
    def next_end(self) -> int:
        """Steps until the first of them ends."""
        return self._ends[0][0] - self.steps

    def join(self, sequence: Sequence) -> None:
        assert sequence.remaining == 1
        assert sequence.allocation is not None
        assert len(sequence.allocation.blocks) == blocks_for(sequence.num_computed), "no block is held for later"
        offset = sequence.num_tokens - self.steps
        self._offsets += offset
        self._by_phase[(1 - offset) % BLOCK_TOKENS].append(sequence)
        heappush(self._ends, (sequence.limit - offset, *sequence.rank, sequence))

    def blocks_more(self, steps: int) -> int:
        """That so many steps take."""
        rounds, left = divmod(steps, BLOCK_TOKENS)
        return rounds * len(self) + sum(len(self._by_phase[(self.steps + step) % BLOCK_TOKENS]) for step in range(left))

    def grow(self, steps: int) -> None:
        """Take these blocks; there must be room."""
        for first in range(min(steps, BLOCK_TOKENS)):
            last = steps - 1 - (steps - 1 - first) % BLOCK_TOKENS
            for sequence in self._by_phase[(self.steps + first) % BLOCK_TOKENS]:
                assert sequence.allocation is not None
                more = (last - first) // BLOCK_TOKENS + 1
                grown = sequence.allocation.grow((len(sequence.allocation.blocks) + more) * BLOCK_TOKENS)
                assert grown, "there was room for all of these steps"

    def advance(self, steps: int) -> list[Sequence]:
        """They have taken so many; blocks that are full may be found. Those that have ended, by rank, leave."""
        self.steps += steps
        for back in range(min(steps, BLOCK_TOKENS)):
            for sequence in self._by_phase[(self.steps - back) % BLOCK_TOKENS]:
                assert sequence.allocation is not None
                full = len(sequence.allocation.blocks) - (back > 0)  # of the last one `back` tokens are there
                sequence.allocation.publish(sequence.hashes, full * BLOCK_TOKENS, sequence.request.tenant)
        ended = []
        while self._ends and self._ends[0][0] <= self.steps:
            ended.append(self._leave(*heappop(self._ends)))
        return ended

    def dissolve(self) -> Iterator[Sequence]:
        """All of them, as they are by now."""
        while self._ends:
            yield self._leave(*self._ends.pop())

    def _leave(self, end: int, priority: int, arrival: int, sequence: Sequence) -> Sequence:
        offset = sequence.limit - end
        self._offsets -= offset
        self._by_phase[(1 - offset) % BLOCK_TOKENS].remove(sequence)
        sequence.output_ids.extend([sequence.id & 0x7FFF_FFFF] * (offset + self.steps - sequence.num_tokens))
        sequence.num_computed = sequence.num_launched = sequence.num_tokens - 1
        return sequence


class SteadyScheduler(Scheduler):
    """`running` are those alone that are not steady; plans are of these. The steady ones take part in every step."""

    def __init__(self, pool: BlockPool, *, max_batch_tokens: int, max_running: int) -> None:
        super().__init__(pool, max_batch_tokens=max_batch_tokens, max_running=max_running)
        self.steady = Steady()

    def __bool__(self) -> bool:
        return bool(self.steady) or super().__bool__()

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.steady)

    def settle(self, sequence: Sequence) -> None:
        """It only decodes from now on."""
        self.running.remove(sequence)
        self.steady.join(sequence)

    def advance(self, steps: int) -> list[Sequence]:
        """The steady ones have taken so many; those that have ended."""
        ended = self.steady.advance(steps)
        self.running += ended
        return ended

    def together(self) -> int:
        """How many steps in a row the steady ones take with nothing beside them; 0: something is, or may be."""
        if self.running or not self.steady or (self.waiting and self.num_running < self.max_running):
            return 0
        count = self.steady.next_end
        while count and self.steady.blocks_more(count) > self.pool.available:
            count //= 2
        return count

    def _plan_running(self, planned: dict[int, PlanItem], budget: int) -> int:
        # Decodes come first. With room for all of them it is the same in which order they take it.
        wanted = self.steady.blocks_more(1) + sum(sequence.remaining == 1 for sequence in self.running)
        if wanted > self.pool.available:
            self.running += self.steady.dissolve()
        elif self.steady:
            self.steady.grow(1)
        return super()._plan_running(planned, budget - len(self.steady))
