"""Paged attention for decode: one new token per sequence, with the KV of each sequence split between programs.

A split is a run of whole steps of the tokens that the query sees. Each split leaves its weighted sum of values, its
highest score and its sum of weights in fp32, and a second kernel combines the splits in a fixed order. With one split
the result is stored directly. Where a split begins follows from the sequence's own length, which is read on the device.
So the grid does not depend on lengths, and the bits of a result do not depend on other sequences in the batch. They do
depend on the config: on SPLITS, on the tokens per step (BLOCK, or ROWS * UNROLL), on WIDE, and through the order of
sums in a program on num_warps. There are two kernels:

packed GQA  the query heads that share a KV head are the rows of one matrix product, at most 16 per program; for tensor
            cores, from capability 8.0
per head    fp32 on CUDA cores: a program has HEADS query heads of one KV head and reads keys and values once for all of
            them. Every row of its tiles has a softmax of its own, and the rows are combined at the end, so that within
            the loop only the sum of a score passes between threads
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
# ruff: noqa: RUF005, SIM102  Triton extends tuples by addition, and a constexpr condition has an `if` of its own

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from ..launch.compiled_launch import cached, cdiv
from ..launch.variant import Config, Constant, Variant
from .attention_tile import FLOOR, LOG2_E, TABLES, AttentionSpec, aligned_pointers, cache_arguments, cells, tile
from .kv_cache import KvCache

Kernel = Literal["packed GQA", "per head"]
MAX_SPLITS = 64
_PACKED_ROWS = 16  # rows per program: more would not fit into registers, and programs share KV through the L2 cache
_COLUMNS = 64  # columns of the result per program of the kernel that combines splits
# Sizes that change from step to step: Triton must not compile a kernel again when one becomes divisible by 16.
SIZES = ("table_stride", "window", "splits")


@triton.jit
def _span(length, window, split, splits, WINDOWED: tl.constexpr, STEP: tl.constexpr):
    """Return the oldest token that is seen, and the range [start, end) of this split: whole steps counted from token 0.

    tokens   0 ...   | oldest ...                               length - 1 |
    steps        | begin   |         |         |         |         |
    splits       |<- split 0: each ->|<- split 1 ------->|<- 2 ----------->|   later splits are empty
    """
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(length - window, 0)
    begin = oldest // STEP
    each = tl.cdiv(tl.cdiv(length, STEP) - begin, splits)
    start = (begin + split * each) * STEP
    return oldest, start, tl.minimum(start + each * STEP, length)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TABLES)
def _packed(
    q, k, v, k_scales, v_scales, tables, context_lens, out, tops, totals, table_stride, window, splits, factor,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, INT8: tl.constexpr,
    WINDOWED: tl.constexpr, SHIFT: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute "packed GQA" decode; a program has up to ROWS of the G query heads of one KV head, one sequence and one
    split.
    """
    kv_head, split = tl.program_id(0) // PARTS, tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    oldest, start, end = _span(tl.load(context_lens + sequence), window, split, splits, WINDOWED, BLOCK)
    if SPLIT:
        if start >= end:
            return
    row, column = tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    head = (sequence * KH + kv_head) * G + row
    used = (row < G)[:, None] & (column < D)[None, :]
    query = tl.load(q + head[:, None] * D + column[None, :], used, 0.0)
    if WIDE:
        query = query.to(tl.float32)
    top = tl.full((ROWS,), FLOOR, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, WIDTH), tl.float32)
    for at in range(start, end, BLOCK):
        mean, top, total = tile(
            query, mean, top, total, k, v, k_scales, v_scales, tables + sequence * table_stride, at, oldest, end,
            row, window, kv_head, factor, KH, D, WIDTH, INT8, WINDOWED, SHIFT, BLOCK, EDGE=True, CAUSAL=False,
        )  # fmt: skip
    if not SPLIT:
        mean = mean / tl.where(total > 0, total, 1.0)[:, None]
    else:
        tl.store(tops + head * splits + split, top * factor, row < G)
        tl.store(totals + head * splits + split, total, row < G)
    place = (head * splits + split)[:, None] * D + column[None, :]
    tl.store(out + place, mean.to(out.dtype.element_ty), used)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TABLES)
def _per_head(
    q, k, v, k_scales, v_scales, tables, context_lens, out, tops, totals, table_stride, window, splits, factor,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, INT8: tl.constexpr,
    WINDOWED: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute "per head" decode; a program has HEADS query heads of one KV head, one sequence and one split.

    Each row of a tile takes UNROLL tokens per step. All loads of a step are issued before the first result is used:
    below capability 8.0 nothing else hides their latency.
    """
    STEP: tl.constexpr = ROWS * UNROLL
    first, split = tl.program_id(0) * HEADS, tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    kv_head = first // G
    oldest, start, end = _span(tl.load(context_lens + sequence), window, split, splits, WINDOWED, STEP)
    if SPLIT:
        if start >= end:
            return
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    valid = column < D
    table = tables + sequence * table_stride
    head = sequence * KH * G + first
    queries = ()
    for h in tl.static_range(HEADS):
        queries = queries + (tl.load(q + (head + h) * D + column, valid, 0.0).to(tl.float32) * factor,)
    highest = (tl.full((ROWS,), FLOOR, tl.float32),) * HEADS
    sums = (tl.zeros((ROWS,), tl.float32),) * HEADS
    means = (tl.zeros((ROWS, WIDTH), tl.float32),) * HEADS
    for at in range(start, end, STEP):
        keys = ()
        values = ()
        key_scales = ()
        value_scales = ()
        seen = ()
        for u in tl.static_range(UNROLL):
            token = at + u * ROWS + row
            inside = (token >= oldest) & (token < end)
            cell = cells(table, token, inside, kv_head, KH)
            place = cell[:, None] * D + column[None, :]
            loaded = inside[:, None] & valid[None, :]
            keys = keys + (tl.load(k + place, loaded, 0),)
            values = values + (tl.load(v + place, loaded, 0),)
            if INT8:
                key_scales = key_scales + (tl.load(k_scales + cell, inside, 0.0),)
                value_scales = value_scales + (tl.load(v_scales + cell, inside, 0.0),)
            seen = seen + (inside,)
        more_highest = ()
        more_sums = ()
        more_means = ()
        for h in tl.static_range(HEADS):
            top = highest[h]
            scores = ()
            for u in tl.static_range(UNROLL):
                score = tl.sum(keys[u].to(tl.float32) * queries[h][None, :], 1)
                if INT8:
                    score *= key_scales[u]
                score = tl.where(seen[u], score, float("-inf"))
                top = tl.maximum(top, score)
                scores = scores + (score,)
            shrink = tl.exp2(highest[h] - top)
            total = sums[h] * shrink
            mean = means[h] * shrink[:, None]
            for u in tl.static_range(UNROLL):
                weight = tl.exp2(scores[u] - top)
                total += weight
                if INT8:
                    weight *= value_scales[u]
                mean += weight[:, None] * values[u].to(tl.float32)
            more_highest = more_highest + (top,)
            more_sums = more_sums + (total,)
            more_means = more_means + (mean,)
        highest = more_highest
        sums = more_sums
        means = more_means
    for h in tl.static_range(HEADS):
        top = tl.max(highest[h], 0)
        shrink = tl.exp2(highest[h] - top)
        total = tl.sum(sums[h] * shrink, 0)
        mean = tl.sum(means[h] * shrink[:, None], 0)
        if not SPLIT:
            mean = mean / tl.where(total > 0, total, 1.0)
        else:
            tl.store(tops + (head + h) * splits + split, top)
            tl.store(totals + (head + h) * splits + split, total)
        tl.store(out + ((head + h) * splits + split) * D + column, mean.to(out.dtype.element_ty), valid)


@triton.jit(do_not_specialize=("window", "splits"), do_not_specialize_on_alignment=("context_lens",))
def _reduce(
    partial, tops, totals, context_lens, out, window, splits,
    D: tl.constexpr, WINDOWED: tl.constexpr, STEP: tl.constexpr, MAX_PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of up to MAX_PARTS splits; a program has COLUMNS columns of one head.

    The results of splits without tokens are never read, since they were never written.
    """
    head, heads = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sequence = tl.program_id(2).to(tl.int64)
    split = tl.arange(0, MAX_PARTS)
    _, start, end = _span(tl.load(context_lens + sequence), window, split, splits, WINDOWED, STEP)
    place = (sequence * heads + head) * splits + split
    working = (split < splits) & (start < end)
    top = tl.load(tops + place, working, FLOOR)
    shrink = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(totals + place, working, 0.0) * shrink, 0)
    valid = working[:, None] & (column < D)[None, :]
    mean = tl.sum(tl.load(partial + place[:, None] * D + column[None, :], valid, 0.0) * shrink[:, None], 0)
    mean = mean / tl.where(total > 0, total, 1.0)
    tl.store(out + (sequence * heads + head) * D + column, mean.to(out.dtype.element_ty), column < D)


def _variant(name: str, kernel: object, heads: AttentionSpec, config: Config, **constants: Constant) -> Variant:
    """Return the decode kernel compiled for SPLITS == 1 or SPLITS > 1; one compilation serves all numbers above 1."""
    split = config["SPLITS"] > 1
    types = {
        "q": f"*{heads.dtype}", **heads.cache_types, "context_lens": "*i32",
        "out": "*fp32" if split else f"*{heads.dtype}", "tops": "*fp32", "totals": "*fp32",
        "table_stride": "i32", "window": "i32", "splits": "i32", "factor": "fp32",
    }  # fmt: skip
    fixed = (*heads.constants, *constants.items(), ("SPLIT", split))
    return Variant(name, kernel, tuple(types.items()), fixed, config.without("SPLITS"), aligned_pointers(types))


@cached
def packed_variant(heads: AttentionSpec, config: Config) -> Variant:
    """Return the compiled variant of the "packed GQA" kernel.

    config  BLOCK: tokens per step; SPLITS; WIDE: products in fp32 (always for q in fp32, never on tensor cores)
    """
    shift, parts = heads.shift(config["WIDE"]), cdiv(heads.group, _PACKED_ROWS)
    return _variant("attention_decode_packed", _packed, heads, config, SHIFT=shift, PARTS=parts, ROWS=_PACKED_ROWS)


@cached
def per_head_variant(heads: AttentionSpec, config: Config) -> Variant:
    """Return the compiled variant of the "per head" kernel.

    config  HEADS: query heads per program, a divisor of the group; ROWS of a tile; UNROLL: tiles per step; SPLITS
    """
    return _variant("attention_decode_heads", _per_head, heads, config)


@cached
def reduce_variant(heads: AttentionSpec, config: Config) -> Variant:
    """Return the compiled variant of the kernel that combines splits; `config` is that of the decode kernel
    before it.
    """
    types = {
        "partial": "*fp32", "tops": "*fp32", "totals": "*fp32", "context_lens": "*i32", "out": f"*{heads.dtype}",
        "window": "i32", "splits": "i32",
    }  # fmt: skip
    few = config["SPLITS"] <= 8
    constants = {
        "D": heads.head_dim, "WINDOWED": heads.windowed, "STEP": _step(config),
        "MAX_PARTS": 8 if few else MAX_SPLITS, "COLUMNS": _COLUMNS,
    }  # fmt: skip
    own = Config.of(1 if few else 4)
    return Variant(
        "attention_decode_reduce", _reduce, tuple(types.items()), tuple(constants.items()), own, aligned_pointers(types)
    )


def _step(config: Config) -> int:
    """Tokens of KV that a program of the decode kernel processes per step."""
    if "BLOCK" in dict(config.constants):
        return config.number("BLOCK")
    return config.number("ROWS") * config.number("UNROLL")


def decode_grids(
    kernel: Kernel, heads: AttentionSpec, config: Config, num_sequences: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the launch grids of a decode kernel and of the kernel that combines its splits."""
    packed = heads.kv_heads * cdiv(heads.group, _PACKED_ROWS)
    programs = packed if kernel == "packed GQA" else heads.heads // config["HEADS"]
    return (
        (programs, config["SPLITS"], num_sequences),
        (heads.heads, cdiv(heads.head_dim, _COLUMNS), num_sequences),
    )


def decode_attention(
    q: torch.Tensor,
    cache: KvCache,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    kernel: Kernel,
    config: Config,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [S, H, D] of q [S, H, D], one token per sequence, in its dtype, in `out` if given.

    block_tables  int32 [S, B]
    context_lens  int32 [S] on the device: tokens in KV including the new one; 0 gives a row of zeros
    scale         above 0
    window        a query at position p sees p - window + 1 .. p; None: all up to p. Tokens that are not seen are not
                  read

    Raises ValueError for an unusable HEADS or SPLITS, or for tensors that the kernels cannot read.
    """
    heads = AttentionSpec.of(q, cache, window)
    if kernel == "per head" and heads.group % config["HEADS"]:
        raise ValueError(f"HEADS: {config['HEADS']} is not a divisor of the {heads.group} heads that share a KV head")
    num_sequences, splits = q.shape[0], config.number("SPLITS")
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"the config's SPLITS is {splits}; expected 1 to {MAX_SPLITS}")
    out = torch.empty_like(q) if out is None else out
    if splits == 1:
        partial, tops = out, out.view(torch.float32)  # valid pointers that are never used
        totals = tops
    else:
        partial = q.new_empty((*q.shape[:2], splits, q.shape[2]), dtype=torch.float32)
        tops, totals = q.new_empty((2, *q.shape[:2], splits), dtype=torch.float32)
    variant = packed_variant(heads, config) if kernel == "packed GQA" else per_head_variant(heads, config)
    first, second = decode_grids(kernel, heads, config, num_sequences)
    sizes = (block_tables.stride(0), window or 0, splits, scale * LOG2_E)
    variant.launch(first, q, *cache_arguments(cache), block_tables, context_lens, partial, tops, totals, *sizes)
    if splits > 1:
        reduce_variant(heads, config).launch(second, partial, tops, totals, context_lens, out, window or 0, splits)
    return out
