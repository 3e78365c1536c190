"""What paged attention for decoding and for prefill share: one tile of keys and values, and the running softmax.

Softmax is carried from tile to tile: the highest score so far, the sum of the weights 2**(score - highest), and the
values summed with these weights, all in fp32. Scores are in units of log 2: their factor is scale * log2(e).

A weight is rounded to the dtype of the values where a tensor core multiplies them. In fp16 weights are first raised
by 2**SHIFT, which the division by their sum takes out again: otherwise all below 6e-5 of the highest would be
subnormal.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..device.dtypes import type_name
from ..launch.variant import Constant
from .kv_cache import BLOCK_TOKENS, KvCache

LOG2_E = math.log2(math.e)
HEAD_DIMS = (64, 80, 96, 128, 256)
FLOOR = tl.constexpr(-1e30)  # below any score, and finite: the difference of two of them is a number
PAGE = tl.constexpr(BLOCK_TOKENS)
TABLES = ("tables", "query_starts", "context_lens")  # parts of larger ones: they begin at any int32


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """All of attention that a kernel is compiled for, its config aside.

    dtype  of q and of the result; kv: of the cache; in Triton's words
    """

    dtype: str
    kv: str
    heads: int
    kv_heads: int
    head_dim: int
    windowed: bool = False

    @classmethod
    def of(cls, q: torch.Tensor, cache: KvCache, window: int | None) -> AttentionSpec:
        """q [.., H, D]. Raises ValueError for what the kernels cannot read."""
        heads, head_dim = q.shape[-2:]
        kv_heads = cache.data.shape[2]
        if head_dim not in HEAD_DIMS or cache.data.shape[-1] != head_dim:
            raise ValueError(f"head_dim: q has {head_dim}, cache {cache.data.shape[-1]}; expected one of {HEAD_DIMS}")
        if heads % kv_heads:
            raise ValueError(f"heads: {heads} over {kv_heads} kv heads; expected a multiple")
        if (cache.scales is not None) != (cache.data.dtype == torch.int8):
            raise ValueError(f"scales: expected with int8 alone, cache is {cache.data.dtype}")
        if not (q.is_contiguous() and cache.data.is_contiguous()):
            raise ValueError("q, cache: expected contiguous")
        if window is not None and window < 1:
            raise ValueError(f"window: {window} tokens; expected at least 1 or None")
        return cls(type_name(q), type_name(cache.data), heads, kv_heads, head_dim, window is not None)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """head_dim as tiles have it."""
        return int(triton.next_power_of_2(self.head_dim))

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        return tuple(
            {
                "KH": self.kv_heads, "G": self.group, "D": self.head_dim, "WIDTH": self.width,
                "INT8": self.kv == "i8", "WINDOWED": self.windowed,
            }.items()
        )  # fmt: skip

    @property
    def cache_types(self) -> dict[str, str]:
        return {"k": f"*{self.kv}", "v": f"*{self.kv}", "k_scales": "*fp32", "v_scales": "*fp32", "tables": "*i32"}

    def shift(self, wide: bool) -> int:
        """Doublings of the weights that fp16 holds. A scale of int8 values may be up to 65504 / 127 < 2**9.02."""
        if wide or self.dtype != "fp16":
            return 0
        return 6 if self.kv == "i8" else 15


def aligned_pointers(types: Mapping[str, str]) -> tuple[str, ...]:
    """Of a kernel's arguments the pointers that are multiples of 16 bytes."""
    return tuple(name for name, kind in types.items() if kind.startswith("*") and name not in TABLES)


def cache_arguments(cache: KvCache) -> tuple[torch.Tensor, ...]:
    """k, v, k_scales, v_scales; the last two are something to point at where there are none."""
    nothing = cache.data.view(torch.float32)
    k_scales, v_scales = (nothing[0], nothing[1]) if cache.scales is None else (cache.scales[0], cache.scales[1])
    return cache.data[0], cache.data[1], k_scales, v_scales


@triton.jit
def cells(table, token, inside, kv_head, KH: tl.constexpr):
    """Where each token's vectors lie, counted in vectors, int64. Of the table only what is inside is read."""
    block = tl.load(table + token // PAGE, inside, 0).to(tl.int64)
    return (block * KH + kv_head) * PAGE + token % PAGE


@triton.jit
def tile(
    query, mean, top, total, k, v, k_scales, v_scales, table, at, oldest, end, position, window, kv_head, factor,
    KH: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, INT8: tl.constexpr, WINDOWED: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """query [ROWS, WIDTH] meets tokens at .. at + BLOCK - 1; returns mean [ROWS, WIDTH], top and total [ROWS].

    EDGE    only tokens in [oldest, end) are read: others may be anything, even NaN
    CAUSAL  of these a row sees those up to its position [ROWS], and within its window
    """
    token = at + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    inside = tl.full((BLOCK,), 1, tl.int1)
    if EDGE:
        inside = (token >= oldest) & (token < end)
    loaded = inside[:, None] & (column < D)[None, :]
    cell = cells(table, token, inside, kv_head, KH)
    place = cell[:, None] * D + column[None, :]
    key = tl.load(k + place, loaded, 0).to(query.dtype)
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if INT8:
        score *= tl.load(k_scales + cell, inside, 0.0)[None, :]
    if CAUSAL:
        seen = inside[None, :] & (token[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (token[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    elif EDGE:
        score = tl.where(inside[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score * factor - (higher * factor - SHIFT)[:, None])
    shrink = tl.exp2((top - higher) * factor)
    total = total * shrink + tl.sum(weight, 1)
    if INT8:
        weight *= tl.load(v_scales + cell, inside, 0.0)[None, :]
    value = tl.load(v + place, loaded, 0).to(query.dtype)
    mean = tl.dot(weight.to(query.dtype), value, mean * shrink[:, None], input_precision="ieee")
    return mean, higher, total
