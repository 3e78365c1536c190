"""int8 products of up to 8 rows of activations by dp4a, below 8.0: bound by memory, over the panels of dp4a.py.

A thread has four rows of the weight, side by side in a panel, and every n-th sixteen of their columns: 64 bytes of
weights in four loads, and 16 of each row of x. What the threads of a block have summed of the same rows is added at
the end. Groups are scaled in fp32, sixteen columns at a time; without groups all is added in int32.
"""

# What is inside a kernel is Triton's language, of which type checkers know nothing.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment,misc,var-annotated"
# ruff: noqa: RUF005  tuples grow by addition there

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dtypes import type_name
from ..variant import Config, Variant
from .dp4a import PTX, beside, dp4a_variant, four, in_panels, products, small_to_float
from .packed import PanelsInt8
from .quantize_rows import QuantizedRows

__all__ = ["MAX_ROWS", "gemv", "gemv_grid", "gemv_variant"]

MAX_ROWS = 8  # of x


@triton.jit(do_not_specialize=("BIASED",))
def _gemv(
    x, x_scales, sums, w, w_scales, zeros, bias, out, N, PADDED_N, K, BIASED,
    M: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, PANEL: tl.constexpr,
    PTX: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Each program: BLOCK_N rows of the weight, four a thread, and all of K, 16 columns a thread and step.

    x is int8 [M, K] as words; a thread's 16 columns are of one group. Their sum, for the zero points of a group, is
    one more column of the product, of ones; of whole rows, `sums` has it. BIASED: N, or 0 without a bias.
    """
    ONES: tl.constexpr = 1 if ZEROS and GROUP > 0 else 0
    THREADS: tl.constexpr = 32 * WARPS
    LANES_N: tl.constexpr = BLOCK_N // 4
    LANES_K: tl.constexpr = THREADS // LANES_N
    thread = tl.arange(0, THREADS)
    column = tl.arange(0, 4)[None, :]
    at_k = thread // LANES_N * 4  # words
    n = thread % LANES_N * 4
    block_n = tl.program_id(0) * BLOCK_N
    w += in_panels(block_n, n, K, PANEL)
    n += block_n
    totals, ones = (), ()
    for _ in tl.static_range(4 * M):
        totals = totals + (tl.zeros((THREADS,), tl.float32 if GROUP > 0 else tl.int32),)
    if ONES:
        ones = (tl.full((THREADS,), 0x01010101, tl.int32),)
    for start in range(0, K // 4, 4 * LANES_K):
        word = start + at_k
        known = (word < K // 4)[:, None] & (column < 4)
        columns = ()
        for step in tl.static_range(4):
            columns = columns + (four(tl.load(w + (word + step)[:, None] * PANEL, known, 0)) + ones,)
        if GROUP > 0:
            at_n = (word * 4 // GROUP)[:, None] * PADDED_N + n[:, None] + column
            scales = four(tl.load(w_scales + at_n, known, 0.0).to(tl.float32))
        if ONES:
            offsets = four(tl.load(zeros + at_n, known, 0).to(tl.int32))
        more = ()
        for m in tl.static_range(M):
            rows = four(tl.load(x + m * (K // 4) + word[:, None] + column, known, 0))
            dots = ()
            for j in tl.static_range(4 + ONES):
                dots = dots + (totals[4 * m + j] if GROUP == 0 and j < 4 else tl.zeros((THREADS,), tl.int32),)
            for step in tl.static_range(4):
                dots = products((rows[step],), columns[step], dots, PTX, 1, 4 + ONES)
            for j in tl.static_range(4):
                dot = dots[j]
                if ONES:
                    dot -= offsets[j] * dots[-1]
                more = more + (totals[4 * m + j] + small_to_float(dot) * scales[j] if GROUP > 0 else dot,)
        totals = more
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, LANES_N)[:, None] * 4 + column
    added = tl.load(bias + at, at < BIASED, 0.0).to(tl.float32)
    for m in tl.static_range(M):
        of_threads = beside(totals[4 * m], totals[4 * m + 1], totals[4 * m + 2], totals[4 * m + 3])
        value = tl.sum(tl.reshape(of_threads, (LANES_K, LANES_N, 4)), 0)
        if GROUP == 0:
            if ZEROS:
                value -= tl.load(zeros + at).to(tl.int32) * tl.load(sums + m)
            value = value.to(tl.float32) * tl.load(w_scales + at).to(tl.float32)
        value *= tl.load(x_scales + m)
        value += added
        tl.store(out + m * N + at, value.to(out.dtype.element_ty), at < N)


def gemv_variant(
    dtype: str,
    num_tokens: int,
    config: Config,
    *,
    scales: str,
    group: int = 0,
    zeros: bool = False,
    bias: str | None = None,
    ptx: bool,
) -> Variant:
    """As `gemm_variant`, for up to MAX_ROWS tokens. config: BLOCK_N rows of the weight, 32 to 128."""
    types = {
        "x": "*i32", "x_scales": "*fp32", "sums": "*i32", "w": "*i32", "w_scales": f"*{scales}", "zeros": "*i8",
        "bias": f"*{bias or dtype}", "out": f"*{dtype}", "N": "i32", "PADDED_N": "i32", "K": "i32",
        "BIASED": "i32",
    }  # fmt: skip
    constants = {"M": num_tokens, "GROUP": group, "ZEROS": zeros, "PTX": PTX if ptx else None}
    return dp4a_variant("w8a8_gemv", _gemv, types, constants, config)


def gemv_grid(num_rows: int, config: Config) -> tuple[int, ...]:
    return (triton.cdiv(num_rows, config["BLOCK_N"]),)


def gemv(x: QuantizedRows, weight: PanelsInt8, dtype: torch.dtype, config: Config) -> torch.Tensor:
    """y [M, N] in `dtype`, M up to MAX_ROWS. Where the weight has zero points of whole rows, x has its rows' sums."""
    num_tokens = x.codes.shape[0]
    out = torch.empty((num_tokens, weight.num_rows), dtype=dtype, device=x.codes.device)
    variant = gemv_variant(
        type_name(out), num_tokens, config, scales=type_name(weight.scales), group=weight.group,
        zeros=weight.zeros is not None, bias=None if weight.bias is None else type_name(weight.bias),
        ptx=x.codes.is_cuda,
    )  # fmt: skip
    sums = x.scales.view(torch.int32) if x.sums is None else x.sums
    variant.launch(
        gemv_grid(weight.num_rows, config), x.codes.view(torch.int32), x.scales, sums,
        weight.words, weight.scales, x.codes if weight.zeros is None else weight.zeros,
        out if weight.bias is None else weight.bias, out, weight.num_rows, weight.scales.shape[1], x.codes.shape[1],
        0 if weight.bias is None else weight.num_rows,
    )  # fmt: skip
    return out
