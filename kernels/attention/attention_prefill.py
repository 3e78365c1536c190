"""Paged attention for prefill in chunks: any number of new tokens per sequence, including decodes in the same batch.

A program has ROWS rows: the query heads that share a KV head, of as many consecutive tokens as fit; where not even one
token's heads fit, an even part of them. It walks the KV of its sequence in tiles of BLOCK tokens, which begin at
multiples of BLOCK from token 0, from the oldest token that any of its rows sees to the newest. A tile that a row does
not see changes nothing of the row. So the bits of a row depend neither on the batch, nor on how its sequence was cut
into chunks, but only on the config: on BLOCK and WIDE, and on ROWS and num_warps in so far as they order the sums of a
row.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.compiled_launch import cached, cdiv
from ..launch.variant import Config, Variant
from .attention_tile import FLOOR, LOG2_E, TABLES, AttentionSpec, aligned_pointers, cache_arguments, tile
from .kv_cache import KvCache


@triton.jit(do_not_specialize=("table_stride", "window"), do_not_specialize_on_alignment=TABLES)
def _prefill(
    q, k, v, k_scales, v_scales, tables, query_starts, context_lens, out, table_stride, window, factor,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, INT8: tl.constexpr,
    WINDOWED: tl.constexpr, SHIFT: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Compute prefill attention; a program has ROWS // G tokens of one sequence and G query heads.

    The G heads are one of PARTS even parts of the query heads that share a KV head.

        rows      token 0: head 0 .. G - 1 | token 1: head 0 .. G - 1 | ... | ROWS % G that stay empty
        KV tiles  0 ...: seen by all rows | edge ...: not by all, so masked .. end

    With a window all tiles are masked: they are few, and a third loop would cost registers.
    """
    TOKENS: tl.constexpr = ROWS // G
    part = tl.program_id(1)
    kv_head = part // PARTS
    sequence = tl.program_id(2).to(tl.int64)
    begin = tl.load(query_starts + sequence)
    new = tl.load(query_starts + sequence + 1) - begin
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS  # programs with the most keys start first
    if first >= new:
        return
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    index = first + row // G
    used = ((row < TOKENS * G) & (index < new))[:, None] & (column < D)[None, :]
    place = (((begin + index).to(tl.int64) * (KH * PARTS) + part) * G + row % G)[:, None] * D + column[None, :]
    query = tl.load(q + place, used, 0.0)
    if WIDE:
        query = query.to(tl.float32)
    before = tl.load(context_lens + sequence) - new
    position = before + index
    end = before + tl.minimum(first + TOKENS, new)
    oldest = 0
    edge = tl.maximum((before + first + 1) // BLOCK * BLOCK, 0)
    if WINDOWED:
        oldest = tl.maximum(before + first - window + 1, 0)
        edge = oldest // BLOCK * BLOCK
    top = tl.full((ROWS,), FLOOR, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, WIDTH), tl.float32)
    table = tables + sequence * table_stride
    if not WINDOWED:
        for at in range(0, edge, BLOCK):
            mean, top, total = tile(
                query, mean, top, total, k, v, k_scales, v_scales, table, at, oldest, end, position, window, kv_head,
                factor, KH, D, WIDTH, INT8, WINDOWED, SHIFT, BLOCK, EDGE=False, CAUSAL=False,
            )  # fmt: skip
    for at in range(edge, end, BLOCK):
        mean, top, total = tile(
            query, mean, top, total, k, v, k_scales, v_scales, table, at, oldest, end, position, window, kv_head,
            factor, KH, D, WIDTH, INT8, WINDOWED, SHIFT, BLOCK, EDGE=True, CAUSAL=True,
        )  # fmt: skip
    mean = mean / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + place, mean.to(out.dtype.element_ty), used)


@cached
def prefill_variant(heads: AttentionSpec, config: Config) -> Variant:
    """Return the compiled variant of the prefill kernel.

    config  ROWS of a program; BLOCK: tokens of KV per step; WIDE: products in fp32 (for q in fp32, and below capability
            8.0)
    """
    types = {
        "q": f"*{heads.dtype}", **heads.cache_types, "query_starts": "*i32", "context_lens": "*i32",
        "out": f"*{heads.dtype}", "table_stride": "i32", "window": "i32", "factor": "fp32",
    }  # fmt: skip
    parts = _parts(heads, config)
    constants = {**dict(heads.constants), "G": heads.group // parts, "PARTS": parts}
    constants["SHIFT"] = heads.shift(config["WIDE"])
    return Variant(
        "attention_prefill", _prefill, tuple(types.items()), tuple(constants.items()), config, aligned_pointers(types)
    )  # fmt: skip


def prefill_grid(heads: AttentionSpec, config: Config, num_sequences: int, max_new: int) -> tuple[int, ...]:
    parts = _parts(heads, config)
    return cdiv(max_new, config["ROWS"] * parts // heads.group), heads.kv_heads * parts, num_sequences


def _parts(heads: AttentionSpec, config: Config) -> int:
    """Smallest number of even parts of the heads that share a KV head such that a part fits into ROWS."""
    return next(
        parts for parts in range(1, heads.group + 1)
        if heads.group % parts == 0 and heads.group // parts <= config["ROWS"]
    )  # fmt: skip


def prefill_attention(
    q: torch.Tensor,
    cache: KvCache,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    max_new: int,
    scale: float,
    window: int | None,
    config: Config,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [T, H, D] of q [T, H, D] of S consecutive sequences, in its dtype, in `out` if given.

    block_tables  int32 [S, B]
    query_starts  int32 [S + 1] on the device: rows query_starts[s] .. query_starts[s + 1] - 1 belong to sequence s and
                  are the last tokens of its context. Rows of no sequence are not written
    context_lens  int32 [S] on the device: tokens in KV including the new ones
    max_new       at least the largest number of new tokens of any sequence
    scale         above 0
    window        a query at position p sees p - window + 1 .. p; None: 0 .. p. KV that no row of a program sees is not
                  read

    Raises ValueError for tensors that the kernels cannot read.
    """
    heads = AttentionSpec.of(q, cache, window)
    out = torch.empty_like(q) if out is None else out
    prefill_variant(heads, config).launch(
        prefill_grid(heads, config, context_lens.shape[0], max_new), q, *cache_arguments(cache), block_tables,
        query_starts, context_lens, out, block_tables.stride(0), window or 0, scale * LOG2_E,
    )  # fmt: skip
    return out
