"""A runner without a model whose "KV cache" holds token ids.

The next token is a hash of the whole history *as read back through the block table*. A block that was freed too
early, shared wrongly or never computed therefore changes the text.
"""

from __future__ import annotations

import hashlib
import struct

import torch

from motley.replicas.plan import ItemResult, PlanItem, StepPlan, StepResult
from motley.replicas.protocol import BLOCK_TOKENS
from motley.replicas.sampler import sample, token_logprob

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
        self.plans: list[StepPlan] = []
        self.fail_next: Exception | None = None
        self.poisoned: set[int] = set()  # token ids whose logits are NaN

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return StepResult(tuple(self._run_item(item) for item in plan.items))

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
        result = sample(self._logits(history)[None], [item.sample])[0]
        return ItemResult(token=result.token, prompt_logprobs=found, fault=result.fault)

    def _logits(self, history: list[int]) -> torch.Tensor:
        logits = logits_of(history, self.vocab_size)
        return logits * torch.nan if history[-1] in self.poisoned else logits

    def _cell(self, item: PlanItem, position: int) -> int:
        return item.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
