"""Paged attention of one new token in each sequence, with the tokens of a sequence split between programs.

A split is a run of whole steps of the tokens that the query sees; each leaves its values summed with weights, its
highest score and its sum of weights in fp32, and a second kernel puts them together in order. With one split the
result is stored at once. Where a split begins follows from the sequence's own length on the device, so that the
grid depends on no length, and bits on nothing else in the batch. They do depend on the config: on SPLITS, on the
tokens of a step (BLOCK, or ROWS * UNROLL), on WIDE, and through the order of sums in a program on num_warps.

packed GQA   the query heads that share a KV head are the rows of one product, 16 at most, else of several programs:
             tensor cores, 8.0 and later
per head     on the lanes in fp32: a program has HEADS query heads of one KV head, and reads keys and values once for
             all of them. Every row of its tiles has a softmax of its own, and the rows meet at the end, so that within
             the loop only the sum of a score passes between threads.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
# ruff: noqa: RUF005, SIM102  tuples grow by addition there, and what is known to the compiler is asked alone

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
_PACKED_ROWS = 16  # of a product: more heads would take more registers than there are, and share the L2 as it is
_COLUMNS = 64  # of the result, for a program that puts splits together
# Sizes that change from step to step: a kernel must not be compiled again for those that 16 divides.
SIZES = ("table_stride", "window", "splits")


@triton.jit
def _span(length, window, split, splits, WINDOWED: tl.constexpr, STEP: tl.constexpr):
    """The oldest token that is seen, and [start, end) of this split: whole steps, counted from token 0.

    tokens   0 ...   | oldest ...                               length - 1 |
    steps        | begin   |         |         |         |         |
    splits       |<- split 0: each ->|<- split 1 ------->|<- 2 ----------->|   those after it have none
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
    """Each program: up to ROWS of the G query heads of a KV head, of one sequence, over one split."""
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
    """Each program: HEADS query heads of one KV head, of one sequence, over one split; UNROLL tokens a row and step.

    A step's loads are all begun before the first is used: nothing else hides their latency below 8.0.
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
    known = column < D
    table = tables + sequence * table_stride
    head = sequence * KH * G + first
    queries = ()
    for h in tl.static_range(HEADS):
        queries = queries + (tl.load(q + (head + h) * D + column, known, 0.0).to(tl.float32) * factor,)
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
            loaded = inside[:, None] & known[None, :]
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
        tl.store(out + ((head + h) * splits + split) * D + column, mean.to(out.dtype.element_ty), known)


@triton.jit(do_not_specialize=("window", "splits"), do_not_specialize_on_alignment=("context_lens",))
def _reduce(
    partial, tops, totals, context_lens, out, window, splits,
    D: tl.constexpr, WINDOWED: tl.constexpr, STEP: tl.constexpr, MOST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program: COLUMNS of one head, of up to MOST splits. What one without work would have left is not read."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sequence = tl.program_id(2).to(tl.int64)
    split = tl.arange(0, MOST)
    _, start, end = _span(tl.load(context_lens + sequence), window, split, splits, WINDOWED, STEP)
    place = (sequence * heads + head) * splits + split
    working = (split < splits) & (start < end)
    top = tl.load(tops + place, working, FLOOR)
    shrink = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(totals + place, working, 0.0) * shrink, 0)
    known = working[:, None] & (column < D)[None, :]
    mean = tl.sum(tl.load(partial + place[:, None] * D + column[None, :], known, 0.0) * shrink[:, None], 0)
    mean = mean / tl.where(total > 0, total, 1.0)
    tl.store(out + (sequence * heads + head) * D + column, mean.to(out.dtype.element_ty), column < D)


def _variant(name: str, kernel: object, heads: AttentionSpec, config: Config, **constants: Constant) -> Variant:
    """SPLITS is known to the kernels as one or more alone, so that all numbers of them are one compilation."""
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
    """config: BLOCK tokens a step, SPLITS, WIDE: products of fp32 (always for q in fp32, never on tensor cores)."""
    shift, parts = heads.shift(config["WIDE"]), cdiv(heads.group, _PACKED_ROWS)
    return _variant("attention_decode_packed", _packed, heads, config, SHIFT=shift, PARTS=parts, ROWS=_PACKED_ROWS)


@cached
def per_head_variant(heads: AttentionSpec, config: Config) -> Variant:
    """config: HEADS of a program, a divisor of the group; ROWS of a tile, UNROLL tiles a step, SPLITS."""
    return _variant("attention_decode_heads", _per_head, heads, config)


@cached
def reduce_variant(heads: AttentionSpec, config: Config) -> Variant:
    """config: that of the kernel before it."""
    types = {
        "partial": "*fp32", "tops": "*fp32", "totals": "*fp32", "context_lens": "*i32", "out": f"*{heads.dtype}",
        "window": "i32", "splits": "i32",
    }  # fmt: skip
    few = config["SPLITS"] <= 8
    constants = {
        "D": heads.head_dim, "WINDOWED": heads.windowed, "STEP": _step(config),
        "MOST": 8 if few else MAX_SPLITS, "COLUMNS": _COLUMNS,
    }  # fmt: skip
    own = Config.of(1 if few else 4)
    return Variant(
        "attention_decode_reduce", _reduce, tuple(types.items()), tuple(constants.items()), own, aligned_pointers(types)
    )


def _step(config: Config) -> int:
    """Tokens."""
    if "BLOCK" in dict(config.constants):
        return config.number("BLOCK")
    return config.number("ROWS") * config.number("UNROLL")


def decode_grids(
    kernel: Kernel, heads: AttentionSpec, config: Config, num_sequences: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the kernel, and of the one that puts its splits together."""
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
    """q [S, H, D], one token a sequence -> [S, H, D] in its dtype, into `out` if given.

    block_tables  int32 [S, B]
    context_lens  int32 [S] on the device: tokens in KV, the new one among them; 0 gives a row of zeros
    scale         above 0
    window        a query at position p sees p - window + 1 .. p; None: all. Nothing that is not seen is read
    """
    heads = AttentionSpec.of(q, cache, window)
    if kernel == "per head" and heads.group % config["HEADS"]:
        raise ValueError(f"HEADS: {config['HEADS']} of {heads.group} that share a KV head; expected a divisor")
    num_sequences, splits = q.shape[0], config.number("SPLITS")
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"SPLITS: {splits}; expected 1 to {MAX_SPLITS}")
    out = torch.empty_like(q) if out is None else out
    if splits == 1:
        partial, tops = out, out.view(torch.float32)  # something to point at: one split leaves neither
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
