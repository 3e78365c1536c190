"""Measurement of the accuracy that is lost where records have fewer bits for a number than KV: made on the model
itself, before any record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...execution.step_plan import PlanItem, StepPlan
from ...execution.swapper import Swapper
from ...types import BLOCK_TOKENS
from ..blocks import Allocation
from ..store.host_kv import RecordPayloads
from ..store.store_worker import HostRecords

MAX_DIVERGENCE_NATS = 0.002  # most nats a token: the bound for the choice of a CPU's kernels as well (test_quality)
PROBE_TOKENS = 2 * BLOCK_TOKENS  # tokens whose distributions are compared


class LogitsRunner(Protocol):
    """Protocol of a runner that returns the logits, fp32 [T, vocabulary], of every token of a plan."""

    def logits(self, plan: StepPlan) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class RoundingTrial:
    """Idle engine whose KV of a prefix is converted to a record and replaced by what the record holds.

    host        converts as many tokens as `lent` has blocks for to a record
    lent        blocks of the host, as many as hold the prefix
    allocation  blocks of the device, for the prefix and what follows it
    """

    runner: LogitsRunner
    swapper: Swapper
    host: HostRecords[RecordPayloads]
    lent: Sequence[int]
    allocation: Allocation

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens of the prefix, whose KV comes from a record."""
        return len(self.lent) * BLOCK_TOKENS

    @torch.inference_mode()
    def compute(self, tokens: Sequence[int]) -> None:
        """Compute the KV of the prefix on the device."""
        blocks = tuple(self.allocation.blocks[: len(self.lent)])
        self.runner.logits(StepPlan((PlanItem(sequence_id=-1, start=0, token_ids=tuple(tokens), blocks=blocks),)))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of tokens that follow the prefix, with the KV that the device has now."""
        item = PlanItem(
            sequence_id=-1, start=self.prefix_tokens, token_ids=tuple(tokens), blocks=tuple(self.allocation.blocks)
        )
        return self.runner.logits(StepPlan((item,)))

    @torch.inference_mode()
    def record(self) -> RecordPayloads | None:
        """Return a record of the prefix's KV; None where a number is too large for the record's dtype."""
        self.swapper.swap(StepPlan((), swap_out=self._pairs))
        self.swapper.mark().wait()
        payloads = self.host.allocate_payloads()
        return payloads if self.host.pack(self.lent, payloads) else None

    @torch.inference_mode()
    def restore(self, record: RecordPayloads) -> bool:
        """Replace the prefix's KV by a record's. Returns False where a number is too large for KV."""
        if not self.host.unpack(record, self.lent):
            return False
        self.swapper.swap(StepPlan((), swap_in=self._pairs))
        self.swapper.mark().wait()
        return True

    @property
    def _pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.allocation.blocks, self.lent, strict=False))


@torch.inference_mode()
def record_divergence(trial: RoundingTrial, tokens: Sequence[int]) -> float:
    """Return the KL divergence of the next token's distribution in nats, as the mean over the last PROBE_TOKENS of
    `tokens`.

    It is taken from the distribution with KV as computed to that with all KV before these tokens from a record.
    Infinite where the record's dtype or KV's is too small for a number.
    """
    assert len(tokens) == trial.prefix_tokens + PROBE_TOKENS
    trial.compute(tokens[: trial.prefix_tokens])
    computed = trial.logits(tokens[trial.prefix_tokens :]).log_softmax(-1)
    record = trial.record()
    if record is None or not trial.restore(record):
        return float("inf")
    rounded = trial.logits(tokens[trial.prefix_tokens :]).log_softmax(-1)
    return float((computed.exp() * (computed - rounded)).sum(-1).mean())
