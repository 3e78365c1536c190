"""Paged KV cache of one layer in the layout that GPU kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch import BLOCK_TOKENS

__all__ = ["BLOCK_TOKENS", "KvCache"]


@dataclass(frozen=True, slots=True)
class KvCache:
    """KV cache of one layer: first all keys, then all values; the tokens of one head and block are contiguous.

    data    [2, num_blocks, KH, BLOCK_TOKENS, D]: fp16, bf16 or int8
    scales  fp32 [2, num_blocks, KH, BLOCK_TOKENS], only for int8: a vector is its codes times its scale
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> KvCache:
        """Allocate a cache filled with zeros, so that entries that were never written are finite."""
        blocks = (2, num_blocks, num_kv_heads, BLOCK_TOKENS)
        scales = torch.zeros(blocks, dtype=torch.float32, device=device) if dtype == torch.int8 else None
        return cls(torch.zeros((*blocks, head_dim), dtype=dtype, device=device), scales)

    @classmethod
    def allocate_whole(
        cls, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Allocate one tensor of zeros that holds all of a cache, as the engine keeps it; `of` gives the cache
        in it.
        """
        if dtype != torch.int8:
            return cls.allocate(num_blocks, num_kv_heads, head_dim, dtype, device).data
        vectors = 2 * num_blocks * num_kv_heads * BLOCK_TOKENS
        return torch.zeros(vectors * (4 + head_dim), dtype=torch.int8, device=device)

    @classmethod
    def of(cls, whole: torch.Tensor, num_kv_heads: int, head_dim: int) -> KvCache:
        """Return the cache that lies in a tensor from `allocate_whole`.

        With int8 the scales come first, so that they lie at multiples of their size.
        """
        if whole.dtype != torch.int8:
            return cls(whole)
        blocks = (2, -1, num_kv_heads, BLOCK_TOKENS)
        split = len(whole) // (4 + head_dim) * 4
        return cls(whole[split:].view(*blocks, head_dim), whole[:split].view(torch.float32).view(blocks))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)
