"""The engine's scheduler for virtual time, in which decoding sequences advance all at once: a step costs only what
changes in it.

Sequences that take one token in every step, whatever else happens, are counted as a whole: their number, their total
length, which of them need a block in which step, and which ends next. Everything else is planned by the engine's own
scheduler, as are they once KV is scarce.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from ..engine.scheduler import Scheduler
from ..engine.sequence import Sequence
from ..execution.step_plan import PlanItem
from ..kv.blocks import BlockPool, blocks_for
from ..types import BLOCK_TOKENS


class SteadySequences:
    """Decoding sequences that have `offset + steps` tokens each: one more with every step, in which all of them take
    part.

    The next step writes the KV of the last of these tokens. A sequence with 16 n + 1 tokens needs a block for it, and
    has just filled the one before. Sequences are grouped by the step, modulo 16, in which that is so.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._offsets = 0  # sum of all sequences' offsets
        self._by_phase: list[list[Sequence]] = [[] for _ in range(BLOCK_TOKENS)]
        self._ends: list[tuple[int, int, int, Sequence]] = []  # heap by the step at which each ends, then by rank

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def context(self) -> int:
        """Tokens of all steadily decoding sequences together."""
        return self._offsets + len(self) * self.steps

    @property
    def next_end(self) -> int:
        """Steps until the first of the steadily decoding sequences ends."""
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
        """Return the number of KV blocks that the steadily decoding sequences need for so many more steps."""
        rounds, left = divmod(steps, BLOCK_TOKENS)
        return rounds * len(self) + sum(len(self._by_phase[(self.steps + step) % BLOCK_TOKENS]) for step in range(left))

    def grow(self, steps: int) -> None:
        """Allocate the KV blocks that the sequences need for so many more steps; there must be enough."""
        for first in range(min(steps, BLOCK_TOKENS)):
            last = steps - 1 - (steps - 1 - first) % BLOCK_TOKENS
            for sequence in self._by_phase[(self.steps + first) % BLOCK_TOKENS]:
                assert sequence.allocation is not None
                more = (last - first) // BLOCK_TOKENS + 1
                grown = sequence.allocation.grow((len(sequence.allocation.blocks) + more) * BLOCK_TOKENS)
                assert grown, "there was room for all of these steps"

    def advance(self, steps: int) -> list[Sequence]:
        """Advance all sequences by so many steps, and publish full blocks for prefix reuse.

        Returns the sequences that have ended, by rank, which are removed.
        """
        self.steps += steps
        for back in range(min(steps, BLOCK_TOKENS)):
            for sequence in self._by_phase[(self.steps - back) % BLOCK_TOKENS]:
                assert sequence.allocation is not None
                full = len(sequence.allocation.blocks) - (
                    back > 0
                )  # if `back` > 0, the last block has only `back` tokens
                sequence.allocation.publish(sequence.hashes, full * BLOCK_TOKENS, sequence.request.tenant)
        ended = []
        while self._ends and self._ends[0][0] <= self.steps:
            ended.append(self._end_sequence(*heappop(self._ends)))
        return ended

    def dissolve(self) -> Iterator[Sequence]:
        """Remove and yield all steadily decoding sequences, in their present state."""
        while self._ends:
            yield self._end_sequence(*self._ends.pop())

    def _end_sequence(self, end: int, priority: int, arrival: int, sequence: Sequence) -> Sequence:
        offset = sequence.limit - end
        self._offsets -= offset
        self._by_phase[(1 - offset) % BLOCK_TOKENS].remove(sequence)
        sequence.output_ids.extend([sequence.id & 0x7FFF_FFFF] * (offset + self.steps - sequence.num_tokens))
        sequence.num_computed = sequence.num_launched = sequence.num_tokens - 1
        return sequence


class SteadyScheduler(Scheduler):
    """Scheduler that keeps steadily decoding sequences apart.

    `running` has only the other sequences, and plans are made of these. The steady ones take part in every step.
    """

    def __init__(self, pool: BlockPool, *, max_batch_tokens: int, max_running: int) -> None:
        super().__init__(pool, max_batch_tokens=max_batch_tokens, max_running=max_running)
        self.steady = SteadySequences()

    def __bool__(self) -> bool:
        return bool(self.steady) or super().__bool__()

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.steady)

    def settle(self, sequence: Sequence) -> None:
        """Move a sequence that only decodes from now on to the steady ones."""
        self.running.remove(sequence)
        self.steady.join(sequence)

    def advance(self, steps: int) -> list[Sequence]:
        """Advance the steady sequences by so many steps, and return those that have ended."""
        ended = self.steady.advance(steps)
        self.running += ended
        return ended

    def together(self) -> int:
        """Return how many consecutive steps the steady sequences can take with nothing else to be planned; 0 if there
        is or may be something else.
        """
        if self.running or not self.steady or (self.waiting and self.num_running < self.max_running):
            return 0
        count = self.steady.next_end
        while count and self.steady.blocks_more(count) > self.pool.available:
            count //= 2
        return count

    def _plan_running(self, planned: dict[int, PlanItem], budget: int) -> int:
        # Decodes come first. Where there are blocks for all of them the order in which they take them does not matter.
        wanted = self.steady.blocks_more(1) + sum(sequence.remaining == 1 for sequence in self.running)
        if wanted > self.pool.available:
            self.running += self.steady.dissolve()
        elif self.steady:
            self.steady.grow(1)
        return super()._plan_running(planned, budget - len(self.steady))
