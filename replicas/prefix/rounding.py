"""What it costs that records have fewer bits for a number than KV: measured on the model itself, before any is made."""

from __future__ import annotations

from typing import Protocol

import torch

from ..blocks import Allocation
from ..gpu.swapper import Swapper
from ..plan import PlanItem, StepPlan
from ..protocol import BLOCK_TOKENS
from .host_kv import HostKv

__all__ = ["BOUND_NATS", "PROBED", "Logits", "divergence"]

BOUND_NATS = 0.002  # per token: what the choice of a CPU's kernels may cost, too (test_quality)
PROBED = 2 * BLOCK_TOKENS  # tokens whose distributions are compared


class Logits(Protocol):
    """A runner that gives logits fp32 [T, vocabulary] of every token of a plan."""

    def logits(self, plan: StepPlan) -> torch.Tensor: ...


@torch.inference_mode()
def divergence(
    runner: Logits, swapper: Swapper, host: HostKv, lent: list[int], allocation: Allocation, tokens: tuple[int, ...]
) -> float:
    """KL divergence in nats of the next token's distribution, on average over the last PROBED of `tokens`.

    From what it is with KV as computed, when all KV before them comes from records. On an engine at rest.

    lent        blocks of the host, as many as hold the tokens before
    allocation  blocks of the device, for all of `tokens`
    """
    known = len(lent) * BLOCK_TOKENS
    assert len(tokens) == known + PROBED
    blocks = tuple(allocation.blocks)
    pairs = tuple(zip(blocks, lent, strict=False))
    probe = StepPlan((PlanItem(sequence_id=-1, start=known, token_ids=tokens[known:], blocks=blocks),))
    runner.logits(StepPlan((PlanItem(sequence_id=-1, start=0, token_ids=tokens[:known], blocks=blocks[: len(lent)]),)))
    computed = runner.logits(probe).log_softmax(-1)
    swapper.swap(StepPlan((), swap_out=pairs))
    swapper.mark().wait()
    room = host.room()
    if not host.pack(lent, room) or not host.unpack(room, lent):
        return float("inf")  # a number is too large for the record's dtype, or the record's for KV
    swapper.swap(StepPlan((), swap_in=pairs))
    swapper.mark().wait()
    rounded = runner.logits(probe).log_softmax(-1)
    return float((computed.exp() * (computed - rounded)).sum(-1).mean())
