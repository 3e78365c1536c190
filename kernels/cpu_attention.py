"""Paged attention on a CPU, in torch operators.

A layer's cache is one tensor [num_blocks, 2, KH, D * 16]. For one block and head, K is stored as [D, 16] (so
that a query meets 16 keys at once, without a horizontal sum) and V as [16, D].
"""

from __future__ import annotations

import torch

from . import reference
from .batch import BLOCK_TOKENS, StepBatch


def allocate(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(num_blocks, 2, num_kv_heads, head_dim * BLOCK_TOKENS, dtype=dtype)


def keys(cache: torch.Tensor) -> torch.Tensor:
    """View [num_blocks, KH, D, 16]."""
    return cache[:, 0].view(*cache[:, 0].shape[:2], -1, BLOCK_TOKENS)


def values(cache: torch.Tensor) -> torch.Tensor:
    """View [num_blocks, KH, 16, D]."""
    return cache[:, 1].view(*cache[:, 1].shape[:2], BLOCK_TOKENS, -1)


def write(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: StepBatch) -> None:
    """k, v [T, KH, D] into their slots."""
    block, offset = batch.slots // BLOCK_TOKENS, batch.slots % BLOCK_TOKENS
    keys(cache)[block, :, :, offset] = k
    values(cache)[block, :, offset] = v


def read(cache: torch.Tensor, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [num_tokens, KH, D] of the sequence whose block ids are `blocks`."""
    k = keys(cache)[blocks].permute(0, 3, 1, 2).flatten(0, 1)
    v = values(cache)[blocks].permute(0, 2, 1, 3).flatten(0, 1)
    return k[:num_tokens], v[:num_tokens]


def attention(q: torch.Tensor, cache: torch.Tensor, batch: StepBatch, scale: float, window: int | None) -> torch.Tensor:
    """Sequence by sequence: q [T, H, D] -> [T, H, D]."""
    out = torch.empty_like(q)
    for index, length in enumerate(batch.context_lens):
        rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
        blocks = batch.block_tables[index, : -(-length // BLOCK_TOKENS)]
        k, v = read(cache, blocks, length)
        out[rows] = reference.attention(q[rows], k, v, batch.positions[rows], scale, window)
    return out
