"""Code shared by the attention kernels for decode and prefill: one tile of keys and values, and the running softmax.

The softmax is carried from tile to tile: the highest score so far, the sum of the weights 2**(score - highest), and the
values summed with these weights, all in fp32. Scores are in units of log 2: their factor is scale * log2(e).

A weight is rounded to the dtype of the values where a tensor core multiplies them. In fp16 weights are first multiplied
by 2**SHIFT, which the division by their sum cancels: otherwise all weights below 6e-5 of the highest would be
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
FLOOR = tl.constexpr(-1e30)  # below any score, and finite, so that the difference of two of them is not NaN
PAGE = tl.constexpr(BLOCK_TOKENS)
# Arguments that are slices of larger tensors: they begin at any int32, so not at multiples of 16 bytes.
TABLES = ("tables", "query_starts", "context_lens")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Specification of attention: everything that a kernel is compiled for, except its launch config.

    dtype  of q and of the result, as Triton's type name
    kv     dtype of the cache, as Triton's type name
    """

    dtype: str
    kv: str
    heads: int
    kv_heads: int
    head_dim: int
    windowed: bool = False

    @classmethod
    def of(cls, q: torch.Tensor, cache: KvCache, window: int | None) -> AttentionSpec:
        """Return the spec of q [.., H, D] and a cache. Raises ValueError for tensors that the kernels cannot read."""
        heads, head_dim = q.shape[-2:]
        kv_heads = cache.data.shape[2]
        if head_dim not in HEAD_DIMS or cache.data.shape[-1] != head_dim:
            raise ValueError(
                f"head_dim: {head_dim} in q and {cache.data.shape[-1]} in the cache; expected one of {HEAD_DIMS}"
            )
        if heads % kv_heads:
            raise ValueError(f"heads: {heads} is not a multiple of the {kv_heads} KV heads")
        if (cache.scales is not None) != (cache.data.dtype == torch.int8):
            raise ValueError(
                f"scales: a cache in int8 must have them, and no other may; this one is in {cache.data.dtype}"
            )
        if not (q.is_contiguous() and cache.data.is_contiguous()):
            raise ValueError("q and the cache must be contiguous in memory")
        if window is not None and window < 1:
            raise ValueError(f"window: {window} is not accepted; expected None, or 1 or more tokens")
        return cls(type_name(q), type_name(cache.data), heads, kv_heads, head_dim, window is not None)

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Width of a tile: head_dim rounded up to a power of two."""
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
        """Exponent of the power of two by which softmax weights are scaled in fp16; 0 where they are not.

        With int8 values it is smaller, since their scale may be up to 65504 / 127 < 2**9.02.
        """
        if wide or self.dtype != "fp16":
            return 0
        return 6 if self.kv == "i8" else 15


def aligned_pointers(types: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of a kernel's pointer arguments that are multiples of 16 bytes."""
    return tuple(name for name, kind in types.items() if kind.startswith("*") and name not in TABLES)


def cache_arguments(cache: KvCache) -> tuple[torch.Tensor, ...]:
    """Return k, v, k_scales and v_scales of a cache; without scales the last two are valid pointers that are never
    read.
    """
    nothing = cache.data.view(torch.float32)
    k_scales, v_scales = (nothing[0], nothing[1]) if cache.scales is None else (cache.scales[0], cache.scales[1])
    return cache.data[0], cache.data[1], k_scales, v_scales


@triton.jit
def cells(table, token, inside, kv_head, KH: tl.constexpr):
    """Return where the cache has each token's vector of this KV head: an int64 index, in units of such vectors.

    Entries of the block table are read only for tokens that are `inside`.
    """
    block = tl.load(table + token // PAGE, inside, 0).to(tl.int64)
    return (block * KH + kv_head) * PAGE + token % PAGE


@triton.jit
def tile(
    query, mean, top, total, k, v, k_scales, v_scales, table, at, oldest, end, position, window, kv_head, factor,
    KH: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, INT8: tl.constexpr, WINDOWED: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Attend query [ROWS, WIDTH] to tokens at .. at + BLOCK - 1; return mean [ROWS, WIDTH], top and total [ROWS].

    EDGE    only tokens in [oldest, end) are read: others may hold anything, even NaN
    CAUSAL  a row sees only the tokens up to its position [ROWS], and within its window
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
