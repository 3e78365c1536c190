"""A runner without a model whose "KV cache" holds token ids.

The next token is a hash of the whole history *as read back through the block table*. A block that was freed too
early, shared wrongly or never computed therefore changes the text.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable

import torch

from motley.replicas.execution.draft_acceptance import accept_drafts
from motley.replicas.execution.sampler import sample, token_logprob
from motley.replicas.execution.step_plan import UNKNOWN_TOKEN, ItemResult, PlanItem, StepPlan, StepResult
from motley.replicas.types import BLOCK_TOKENS

EMPTY = -1


def logits_of(history: list[int], vocab_size: int) -> torch.Tensor:
    """Logits fp32 [vocabulary] that depend on every token of the history."""
    digest = hashlib.sha256(struct.pack(f"<{len(history)}i", *history)).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return 3 * torch.randn(vocab_size, generator=generator)


class FakeRunner:
    def __init__(self, num_blocks: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.cells = [EMPTY] * (num_blocks * BLOCK_TOKENS)
        self.kept: dict[int, list[int]] = {}  # by block of the host
        self.plans: list[StepPlan] = []
        self.fail_next: Exception | None = None
        self.poisoned: set[int] = set()  # token ids whose logits are NaN

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return StepResult(tuple(self._run_item(item) for item in plan.items))

    def swap(self, plan: StepPlan) -> None:
        for block, retained in plan.swap_out:
            self.kept[retained] = self.cells[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        for block, retained in plan.swap_in:
            self.cells[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = self.kept[retained]

    def _run_item(self, item: PlanItem) -> ItemResult:
        assert len(item.blocks) * BLOCK_TOKENS >= item.end
        for position, token in enumerate(item.token_ids, item.start):
            self.cells[self._cell(item, position)] = token
        history = [self.cells[self._cell(item, position)] for position in range(item.end)]
        assert EMPTY not in history, "read a block that was never computed"
        found = tuple(
            token_logprob(self._logits(history[: item.start + i + 1]), target, item.prompt_top)
            for i, target in enumerate(item.prompt_targets)
        )
        if item.sample is None:
            return ItemResult(prompt_logprobs=found)
        lengths = range(item.end - len(item.specs) + 1, item.end + 1)
        rows = torch.stack([self._logits(history[:length]) for length in lengths])
        return accept_drafts(item, sample(rows, item.specs))._replace(prompt_logprobs=found)

    def _logits(self, history: list[int]) -> torch.Tensor:
        logits = logits_of(history, self.vocab_size)
        return logits * torch.nan if history[-1] in self.poisoned else logits

    def _cell(self, item: PlanItem, position: int) -> int:
        return item.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


class AheadRunner(FakeRunner):
    """Computes a plan as late as it may: when its result is asked for. It alone knows tokens until then."""

    depth, staged = 2, False

    def __init__(self, num_blocks: int, vocab_size: int) -> None:
        super().__init__(num_blocks, vocab_size)
        self.num_ahead = 0  # plans launched while another was on its way
        self.most_ahead = 0  # on their way at once
        self._queue: deque[tuple[StepPlan, list[StepResult | Exception]]] = deque()
        self._sampled: dict[int, int] = {}  # sequence -> the token of the plan computed last, where it was plain

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        outcome: list[StepResult | Exception] = []
        self.num_ahead += bool(self._queue)
        assert len(self._queue) < self.depth, "results are asked for in time"
        if self.staged:
            on_their_way = {item.sequence_id for one, _ in self._queue for item in one.items if item.sample is not None}
            assert not on_their_way & {item.sequence_id for item in plan.items}, "a sequence is in one step only"
        self._queue.append((plan, outcome))
        self.most_ahead = max(self.most_ahead, len(self._queue))

        def result() -> StepResult:
            while not outcome:
                self._compute()
            if isinstance(outcome[0], Exception):
                raise outcome[0]
            return outcome[0]

        return result

    def swap(self, plan: StepPlan) -> None:
        """Out as early as it may be, before what is on its way; in after that."""
        while plan.swap_in and self._queue:
            self._compute()
        super().swap(plan)

    def _compute(self) -> None:
        plan, outcome = self._queue.popleft()
        try:
            known = StepPlan(tuple(self._known(item) for item in plan.items))
            result = self.run(known)
        except RuntimeError as error:
            outcome.append(error)
            return
        self._sampled = {
            item.sequence_id: one.token.token_id
            for item, one in zip(plan.items, result.items, strict=True)
            if one.token is not None and item.sample is not None and item.sample.plain
        }
        outcome.append(result)

    def _known(self, item: PlanItem) -> PlanItem:
        assert UNKNOWN_TOKEN not in item.token_ids[:-1]
        if item.token_ids[-1] != UNKNOWN_TOKEN:
            return item
        assert not self.staged, "tokens of a pipeline are chosen where it ends"
        return item._replace(token_ids=(*item.token_ids[:-1], self._sampled[item.sequence_id]))


class StagedRunner(AheadRunner):
    """A pipeline of three stages."""

    depth, staged = 3, True
