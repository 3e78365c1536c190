"""The paged KV cache of one layer as GPU kernels see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch import BLOCK_TOKENS

__all__ = ["BLOCK_TOKENS", "KvCache"]


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys first, then values; the tokens of one head and block lie together.

    data    [2, num_blocks, KH, BLOCK_TOKENS, D]: fp16, bf16 or int8
    scales  fp32 [2, num_blocks, KH, BLOCK_TOKENS], of int8 alone: a vector is its codes times its scale
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> KvCache:
        """Zeroed, so that what was never written is finite."""
        blocks = (2, num_blocks, num_kv_heads, BLOCK_TOKENS)
        scales = torch.zeros(blocks, dtype=torch.float32, device=device) if dtype == torch.int8 else None
        return cls(torch.zeros((*blocks, head_dim), dtype=dtype, device=device), scales)

    @classmethod
    def allocate_whole(
        cls, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """One tensor that holds all of a cache, as the engine keeps it: see `of`. Zeroed."""
        if dtype != torch.int8:
            return cls.allocate(num_blocks, num_kv_heads, head_dim, dtype, device).data
        vectors = 2 * num_blocks * num_kv_heads * BLOCK_TOKENS
        return torch.zeros(vectors * (4 + head_dim), dtype=torch.int8, device=device)

    @classmethod
    def of(cls, whole: torch.Tensor, num_kv_heads: int, head_dim: int) -> KvCache:
        """The cache in such a tensor. Of int8 the scales come first: they lie at multiples of their size then."""
        if whole.dtype != torch.int8:
            return cls(whole)
        blocks = (2, -1, num_kv_heads, BLOCK_TOKENS)
        split = len(whole) // (4 + head_dim) * 4
        return cls(whole[split:].view(*blocks, head_dim), whole[:split].view(torch.float32).view(blocks))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)
