"""The tensor side of a step: prepare, forward, sample."""

from __future__ import annotations

import itertools
from typing import Protocol

import torch

from ..kernels.batch import StepBatch
from .plan import ItemResult, PlanItem, StepPlan, StepResult
from .protocol import BLOCK_TOKENS
from .sampler import sample, token_logprob


class Runner(Protocol):
    """Runs a plan. Knows nothing of requests, queues or text."""

    def run(self, plan: StepPlan) -> StepResult: ...


class Model(Protocol):
    """A decoder bound to its operators: writes this step's KV and returns logits fp32 [R, vocabulary]."""

    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor: ...


class ModelRunner:
    """A decoder and its KV cache on one device."""

    def __init__(self, model: Model, kv: list[torch.Tensor], device: torch.device) -> None:
        self.model = model
        self.kv = kv
        self.device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        logits = self.model.forward(prepare(plan, self.device), self.kv)
        counts = [_num_rows(item) for item in plan.items]
        ends = list(itertools.accumulate(counts))
        last = [end - 1 for item, end in zip(plan.items, ends, strict=True) if item.sample]
        chosen = logits if len(last) == len(logits) else logits[last]
        sampled = iter(sample(chosen, [item.sample for item in plan.items if item.sample]))
        rows = torch.split(logits, counts)
        return StepResult(
            tuple(
                _with_prompt_logprobs(item, item_rows, next(sampled) if item.sample else ItemResult())
                for item, item_rows in zip(plan.items, rows, strict=True)
            )
        )

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Logits fp32 [T, vocabulary] of every token of the plan."""
        return self.model.forward(prepare(plan, self.device, all_rows=True), self.kv)


def prepare(plan: StepPlan, device: torch.device, *, all_rows: bool = False) -> StepBatch:
    """The plan as one ragged batch of tensors on `device`."""
    items = plan.items
    starts = (0, *itertools.accumulate(len(item.token_ids) for item in items))
    positions = [position for item in items for position in range(item.start, item.end)]
    slots = [
        item.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
        for item in items
        for position in range(item.start, item.end)
    ]
    longest = max(len(item.blocks) for item in items)
    tables = [[*item.blocks, *[0] * (longest - len(item.blocks))] for item in items]
    rows = (
        range(starts[-1]) if all_rows else [r for item, at in zip(items, starts, strict=False) for r in _rows(item, at)]
    )
    return StepBatch(
        token_ids=_tensor([token for item in items for token in item.token_ids], device),
        positions=_tensor(positions, device),
        slots=_tensor(slots, device),
        query_starts=starts,
        context_lens=tuple(item.end for item in items),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        logit_rows=_tensor(list(rows), device),
        num_decodes=sum(len(item.token_ids) == 1 for item in items),
    )


def _tensor(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _rows(item: PlanItem, at: int) -> list[int]:
    """Rows whose logits the item needs: one per prompt target, then the one that is sampled."""
    rows = list(range(at, at + len(item.prompt_targets)))
    return [*rows, at + len(item.token_ids) - 1] if item.sample else rows


def _num_rows(item: PlanItem) -> int:
    return len(item.prompt_targets) + (item.sample is not None)


def _with_prompt_logprobs(item: PlanItem, rows: torch.Tensor, result: ItemResult) -> ItemResult:
    if not item.prompt_targets:
        return result
    found = [
        token_logprob(row, target, item.prompt_top) for row, target in zip(rows, item.prompt_targets, strict=False)
    ]
    return ItemResult(token=result.token, prompt_logprobs=tuple(found), fault=result.fault)
