"""int8 product by dp4a, four multiply-adds per instruction, for capabilities 6.1, 7.0 and 7.5 without int8 tl.dot.

Both operands are in panels of 128 rows: words of four neighbouring columns, the rows of a panel side by side:

    panels int32 [rows / 128, K / 4, 128]:  byte i of panels[p, j, r] is column 4 * j + i of row 128 * p + r

so that a thread reads four rows with one load, whose address differs from the previous one by a constant. The elements
of a thread are spelled out: tensors have a row for each thread, and there is an accumulator for each of the TILE_M x
TILE_N results of a thread, so that no data moves between threads. With 8 x 8 a thread loads 16 words in four loads for
64 dp4a. Operands are read through L1 (`.ca`, which 6.1 does not do by default): Triton has no shared memory that could
be read in slices.

The dot product of a whole group of up to 128 columns is below 2**22 even with its zero point, so that one or and one
subtraction convert it to fp32; conversion instructions run at a quarter of the rate.
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment,misc"
# ruff: noqa: RUF005  Triton extends tuples by addition

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..device.dtypes import type_name
from ..launch.compiled_launch import cached, cdiv
from ..launch.variant import Config, Variant
from .packed_int8 import PanelsInt8
from .quantize_panels import PANEL, QuantizedPanels

PTX = "dp4a.s32.s32 $0, $1, $2, $3;"


@triton.jit
def products(rows, columns, sums, PTX: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return sums[i, j] + the four products of bytes of rows[i] and columns[j], by dp4a.

    Without PTX, for Triton's interpreter, plain arithmetic gives the same result.
    """
    more = ()
    if PTX is None:
        left, right = (), ()
        for byte in tl.static_range(4):
            for i in tl.static_range(TILE_M):
                left = left + ((rows[i] << (24 - 8 * byte)) >> 24,)
            for j in tl.static_range(TILE_N):
                right = right + ((columns[j] << (24 - 8 * byte)) >> 24,)
        for i in tl.static_range(TILE_M):
            for j in tl.static_range(TILE_N):
                total = sums[i * TILE_N + j]
                for byte in tl.static_range(4):
                    total += left[byte * TILE_M + i] * right[byte * TILE_N + j]
                more = more + (total,)
    else:
        for i in tl.static_range(TILE_M):
            for j in tl.static_range(TILE_N):
                operands = [rows[i], columns[j], sums[i * TILE_N + j]]
                total = tl.inline_asm_elementwise(PTX, "=r,r,r,r", operands, dtype=tl.int32, is_pure=True, pack=1)
                more = more + (total,)
    return more


@triton.jit
def four(values):
    """Return the four columns of a tensor [T, 4], each [T]."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def beside(first, second, third, fourth):
    """Join four tensors [T] into one [T, 4]."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (first.shape[0], 4))


@triton.jit
def in_panels(block, row, K, PANEL: tl.constexpr):
    """Return the positions [T, 4] of the first words of rows block + row .. + 3 in panels, for `row` [T].

    `row` and `block` must be multiples of 4, and all rows of a block must lie in one panel.
    """
    start = (block // PANEL).to(tl.int64) * (K // 4) * PANEL + block % PANEL
    place = start + row[:, None] + tl.arange(0, 4)[None, :]
    # Triton 3.7 does not infer this: it would load word by word and exchange the words through shared memory.
    return tl.max_contiguous(tl.multiple_of(place, (1, 4)), (1, 4))


@triton.jit
def small_to_float(value):
    """Convert integers with magnitudes below 2**22 to fp32."""
    return (value + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def _words(start, TILE: tl.constexpr, STRIDE: tl.constexpr):
    """Load TILE words for each thread: groups of four neighbours, STRIDE apart."""
    found = ()
    for block in tl.static_range(TILE // 4):
        found = found + four(tl.load(start + block * STRIDE, cache_modifier=".ca"))
    return found


@triton.jit
def _dots(
    x, w, words, PANEL: tl.constexpr, PTX: tl.constexpr, THREADS: tl.constexpr, UNROLL: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr,
):  # fmt: skip
    """Return TILE_M * TILE_N tensors int32 [THREADS]: the dot products over the next `words` words of x and w."""
    sums = ()
    for _ in tl.static_range(TILE_M * TILE_N):
        sums = sums + (tl.zeros((THREADS,), tl.int32),)
    for _ in range(0, words, UNROLL):
        for step in tl.static_range(UNROLL):
            rows = _words(x + step * PANEL, TILE_M, STRIDE_M)
            columns = _words(w + step * PANEL, TILE_N, STRIDE_N)
            sums = products(rows, columns, sums, PTX, TILE_M, TILE_N)
        x += UNROLL * PANEL
        w += UNROLL * PANEL
    return sums


@triton.jit(do_not_specialize=("M", "BIASED"))
def _gemm(
    x, x_scales, sums, w, w_scales, zeros, bias, out, M, PADDED_M, N, PADDED_N, K, BIASED,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, PANEL: tl.constexpr, TOGETHER: tl.constexpr,
    PTX: tl.constexpr, WARPS: tl.constexpr, WARPS_N: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute one block of y per program; a warp has 4 x 8 threads, and WARPS_N warps are side by side.

    Scales, zeros and sums are padded to the width of the panels: [K / GROUP, PADDED_N] or [.., PADDED_M]. BIASED is N,
    or 0 without a bias.
    """
    THREADS: tl.constexpr = 32 * WARPS
    STRIDE_M: tl.constexpr = 4 * 4 * (WARPS // WARPS_N)  # rows of all threads, four for each
    STRIDE_N: tl.constexpr = 4 * 8 * WARPS_N
    BLOCK_M: tl.constexpr = STRIDE_M * TILE_M // 4
    BLOCK_N: tl.constexpr = STRIDE_N * TILE_N // 4
    blocks_m = tl.cdiv(M, BLOCK_M)
    band = TOGETHER * tl.cdiv(N, BLOCK_N)
    first_m = tl.program_id(0) // band * TOGETHER
    height = tl.minimum(blocks_m - first_m, TOGETHER)
    inside = tl.program_id(0) % band
    block_m = (first_m + inside % height) * BLOCK_M
    block_n = inside // height * BLOCK_N
    thread = tl.arange(0, THREADS)
    warp, lane = thread // 32, thread % 32
    column = tl.arange(0, 4)[None, :]
    m = (warp // WARPS_N * 4 + lane // 8) * 4
    n = (warp % WARPS_N * 8 + lane % 8) * 4
    x += in_panels(block_m, m, K, PANEL)
    w += in_panels(block_n, n, K, PANEL)
    m += block_m
    n += block_n
    totals = ()
    for _ in tl.static_range(TILE_M * TILE_N):
        totals = totals + (tl.zeros((THREADS,), tl.float32),)
    if GROUP > 0:
        for group in range(0, K // GROUP):
            dots = _dots(x, w, GROUP // 4, PANEL, PTX, THREADS, UNROLL, TILE_M, TILE_N, STRIDE_M, STRIDE_N)
            x += GROUP // 4 * PANEL
            w += GROUP // 4 * PANEL
            at_n = group * PADDED_N + n[:, None] + column
            at_m = group * PADDED_M + m[:, None] + column
            totals = _scaled(
                totals, dots, sums + at_m, w_scales + at_n, zeros + at_n,
                ZEROS, True, TILE_M, TILE_N, STRIDE_M, STRIDE_N,
            )  # fmt: skip
    else:
        dots = _dots(x, w, K // 4, PANEL, PTX, THREADS, UNROLL, TILE_M, TILE_N, STRIDE_M, STRIDE_N)
        at_n, at_m = n[:, None] + column, m[:, None] + column
        totals = _scaled(
            totals, dots, sums + at_m, w_scales + at_n, zeros + at_n, ZEROS, False, TILE_M, TILE_N, STRIDE_M, STRIDE_N
        )
    for i in tl.static_range(TILE_M):
        row = m + i // 4 * STRIDE_M + i % 4
        scale = tl.load(x_scales + row, row < M, 0.0)
        for block in tl.static_range(TILE_N // 4):
            at = n[:, None] + column + block * STRIDE_N
            found = ()
            for j in tl.static_range(4):
                found = found + (totals[i * TILE_N + 4 * block + j] * scale,)
            value = beside(found[0], found[1], found[2], found[3])
            value += tl.load(bias + at, at < BIASED, 0.0).to(tl.float32)
            inside_out = (row < M)[:, None] & (at < N)
            tl.store(out + row.to(tl.int64)[:, None] * N + at, value.to(out.dtype.element_ty), inside_out)


@triton.jit
def _scaled(
    totals, dots, sums, w_scales, zeros, ZEROS: tl.constexpr, SMALL: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr,
):  # fmt: skip
    """Return totals + scale * (dots - zero * sum of the x codes).

    sums, w_scales and zeros are pointers [THREADS, 4] to the first four elements of each thread.
    """
    scales, offsets = (), ()
    for block in tl.static_range(TILE_N // 4):
        scales = scales + four(tl.load(w_scales + block * STRIDE_N).to(tl.float32))
        if ZEROS:
            offsets = offsets + four(tl.load(zeros + block * STRIDE_N).to(tl.int32))
    of_x = ()
    if ZEROS:
        of_x = _words(sums, TILE_M, STRIDE_M)
    more = ()
    for i in tl.static_range(TILE_M):
        for j in tl.static_range(TILE_N):
            dot = dots[i * TILE_N + j]
            if ZEROS:
                dot -= offsets[j] * of_x[i]
            wide = small_to_float(dot) if SMALL else dot.to(tl.float32)
            more = more + (totals[i * TILE_N + j] + wide * scales[j],)
    return more


def dp4a_variant(
    name: str, function: Any, types: dict[str, str], constants: dict[str, int | bool | str | None], config: Config
) -> Variant:
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    sizes = tuple(name for name in ("PADDED_M", "N", "PADDED_N", "K") if name in types)
    constants |= {"PANEL": PANEL, "WARPS": config.num_warps}
    return Variant(name, function, tuple(types.items()), tuple(constants.items()), config, (*pointers, *sizes))


@cached
def gemm_variant(
    dtype: str, config: Config, *, scales: str, group: int = 0, zeros: bool = False, bias: str | None = None, ptx: bool
) -> Variant:
    """Return the compiled variant of the dp4a product for more than 8 rows.

    dtype, scales, bias  Triton type names of y, of the scales and of the bias
    ptx                  whether to use inline PTX; Triton's interpreter does not support it
    config               TILE_M x TILE_N results per thread, WARPS_N warps side by side, UNROLL words of K at a time
    """
    types = {
        "x": "*i32", "x_scales": "*fp32", "sums": "*i32", "w": "*i32", "w_scales": f"*{scales}", "zeros": "*i8",
        "bias": f"*{bias or dtype}", "out": f"*{dtype}",
        "M": "i32", "PADDED_M": "i32", "N": "i32", "PADDED_N": "i32", "K": "i32",
        "BIASED": "i32",
    }  # fmt: skip
    constants = {"GROUP": group, "ZEROS": zeros, "TOGETHER": 8, "PTX": PTX if ptx else None}
    return dp4a_variant("w8a8_dp4a", _gemm, types, constants, config)


def gemm_block(config: Config) -> tuple[int, int]:
    """Rows of x and rows of the weight that a program of `gemm_variant` computes."""
    warps_n = config["WARPS_N"]
    return 4 * (config.num_warps // warps_n) * config["TILE_M"], 8 * warps_n * config["TILE_N"]


def gemm_grid(num_tokens: int, num_rows: int, config: Config) -> tuple[int, ...]:
    block_m, block_n = gemm_block(config)
    return (cdiv(num_tokens, block_m) * cdiv(num_rows, block_n),)


def gemm(x: QuantizedPanels, weight: PanelsInt8, dtype: torch.dtype, config: Config) -> torch.Tensor:
    """Return y [M, N] in `dtype`. If the weight has zero points, x must have the sums of its groups."""
    num_tokens, device = x.scales.shape[0], x.scales.device
    out = torch.empty((num_tokens, weight.num_rows), dtype=dtype, device=device)
    variant = gemm_variant(
        type_name(out), config, scales=type_name(weight.scales), group=weight.group, zeros=weight.zeros is not None,
        bias=None if weight.bias is None else type_name(weight.bias), ptx=x.words.is_cuda,
    )  # fmt: skip
    zeros = x.words.view(torch.int8) if weight.zeros is None else weight.zeros
    variant.launch(
        gemm_grid(num_tokens, weight.num_rows, config), x.words, x.scales, x.words if x.sums is None else x.sums,
        weight.words, weight.scales, zeros,
        out if weight.bias is None else weight.bias, out,
        num_tokens, PANEL * x.words.shape[0], weight.num_rows, weight.scales.shape[1], 4 * weight.words.shape[1],
        0 if weight.bias is None else weight.num_rows,
    )  # fmt: skip
    return out
