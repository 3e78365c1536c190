"""int8 products by dp4a, four multiply-adds at a time: for 6.1, 7.0 and 7.5, where Triton has no int8 dot.

Both operands in panels of 128 rows, words of four neighbouring columns, the rows of a panel side by side:

    panels int32 [rows / 128, K / 4, 128]:  byte i of panels[p, j, r] is column 4 * j + i of row 128 * p + r

so that a thread reads four rows with one load, whose address differs from the last one's by a constant. What a
thread holds is written out: tensors have a row for each thread, and an accumulator for each of its TILE_M x TILE_N
results, so that nothing changes hands. With 8 x 8 a thread loads 16 words in four loads for 64 dp4a. Operands come
through L1 (`.ca`, which 6.1 does not do unasked): Triton has no shared memory that could be read in slices.

A whole group's dot of up to 128 columns is below 2**22, zero point and all, so that it becomes fp32 by one or and
one subtraction; conversions run at a quarter of the rate.
"""

# What is inside a kernel is Triton's language, of which type checkers know nothing.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
# ruff: noqa: RUF005  tuples grow by addition there

from __future__ import annotations

import triton
import triton.language as tl

from .quantize_panels import PANEL
from .variant import Config, Variant

__all__ = ["MAX_ROWS", "PANEL", "PTX", "gemm_grid", "gemm_variant", "gemv_variant"]

MAX_ROWS = 8  # of x in the GEMV
PTX = "dp4a.s32.s32 $0, $1, $2, $3;"


@triton.jit
def _products(rows, columns, sums, PTX: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """sums[i, j] + the four products of bytes of rows[i] and columns[j]: dp4a; without PTX, for the interpreter."""
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
def _four(values):
    """The columns of [T, 4], each [T]."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _beside(first, second, third, fourth):
    """[T, 4] of four [T]."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (first.shape[0], 4))


@triton.jit
def _small_to_float(value):
    """Of integers below 2**22."""
    return (value + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def _words(start, TILE: tl.constexpr, STRIDE: tl.constexpr):
    """TILE words, four at a time and those STRIDE apart, of each thread."""
    found = ()
    for block in tl.static_range(TILE // 4):
        found = found + _four(tl.load(start + block * STRIDE, cache_modifier=".ca"))
    return found


@triton.jit
def _dots(
    x, w, words, PANEL: tl.constexpr, PTX: tl.constexpr, THREADS: tl.constexpr, UNROLL: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr,
):  # fmt: skip
    """TILE_M * TILE_N tensors int32 [THREADS], of so many words of x and w."""
    sums = ()
    for _ in tl.static_range(TILE_M * TILE_N):
        sums = sums + (tl.zeros((THREADS,), tl.int32),)
    for _ in range(0, words, UNROLL):
        for step in tl.static_range(UNROLL):
            rows = _words(x + step * PANEL, TILE_M, STRIDE_M)
            columns = _words(w + step * PANEL, TILE_N, STRIDE_N)
            sums = _products(rows, columns, sums, PTX, TILE_M, TILE_N)
        x += UNROLL * PANEL
        w += UNROLL * PANEL
    return sums


@triton.jit
def _gemm(
    x, x_scales, sums, w, w_scales, zeros, bias, out, M, PADDED_M, N, PADDED_N, K,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, PANEL: tl.constexpr, TOGETHER: tl.constexpr,
    PTX: tl.constexpr, WARPS: tl.constexpr, WARPS_N: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Each program: a block of y; a warp has 4 x 8 threads, side by side WARPS_N of them.

    Scales, zeros and sums are as wide as the panels: [K / GROUP, PADDED_N] or [.., PADDED_M].
    """
    THREADS: tl.constexpr = 32 * WARPS
    STRIDE_M: tl.constexpr = 4 * 4 * (WARPS // WARPS_N)  # rows of all threads, four each
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
    four = tl.arange(0, 4)[None, :]
    m = (warp // WARPS_N * 4 + lane // 8) * 4
    n = (warp % WARPS_N * 8 + lane % 8) * 4
    x += (block_m // PANEL).to(tl.int64) * (K // 4) * PANEL + block_m % PANEL + m[:, None] + four
    w += (block_n // PANEL).to(tl.int64) * (K // 4) * PANEL + block_n % PANEL + n[:, None] + four
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
            at_n = group * PADDED_N + n[:, None] + four
            at_m = group * PADDED_M + m[:, None] + four
            totals = _scaled(
                totals, dots, sums + at_m, w_scales + at_n, zeros + at_n,
                ZEROS, True, TILE_M, TILE_N, STRIDE_M, STRIDE_N,
            )  # fmt: skip
    else:
        dots = _dots(x, w, K // 4, PANEL, PTX, THREADS, UNROLL, TILE_M, TILE_N, STRIDE_M, STRIDE_N)
        at_n, at_m = n[:, None] + four, m[:, None] + four
        totals = _scaled(
            totals, dots, sums + at_m, w_scales + at_n, zeros + at_n, ZEROS, False, TILE_M, TILE_N, STRIDE_M, STRIDE_N
        )
    for i in tl.static_range(TILE_M):
        row = m + i // 4 * STRIDE_M + i % 4
        scale = tl.load(x_scales + row, row < M, 0.0)
        for block in tl.static_range(TILE_N // 4):
            at = n[:, None] + four + block * STRIDE_N
            found = ()
            for j in tl.static_range(4):
                found = found + (totals[i * TILE_N + 4 * block + j] * scale,)
            value = _beside(found[0], found[1], found[2], found[3])
            if BIAS:
                value += tl.load(bias + at, at < N, 0.0).to(tl.float32)
            inside_out = (row < M)[:, None] & (at < N)
            tl.store(out + row.to(tl.int64)[:, None] * N + at, value.to(out.dtype.element_ty), inside_out)


@triton.jit
def _scaled(
    totals, dots, sums, w_scales, zeros, ZEROS: tl.constexpr, SMALL: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr,
):  # fmt: skip
    """totals + scale * (dots - zero * sum of the x codes): pointers [THREADS, 4] to the first four of each."""
    scales, offsets = (), ()
    for block in tl.static_range(TILE_N // 4):
        scales = scales + _four(tl.load(w_scales + block * STRIDE_N).to(tl.float32))
        if ZEROS:
            offsets = offsets + _four(tl.load(zeros + block * STRIDE_N).to(tl.int32))
    of_x = ()
    if ZEROS:
        of_x = _words(sums, TILE_M, STRIDE_M)
    more = ()
    for i in tl.static_range(TILE_M):
        for j in tl.static_range(TILE_N):
            dot = dots[i * TILE_N + j]
            if ZEROS:
                dot -= offsets[j] * of_x[i]
            wide = _small_to_float(dot) if SMALL else dot.to(tl.float32)
            more = more + (totals[i * TILE_N + j] + wide * scales[j],)
    return more


@triton.jit
def _gemv(
    x, x_scales, w, w_scales, zeros, bias, out, N, PADDED_N, K,
    M: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, PANEL: tl.constexpr,
    PTX: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Each program: BLOCK_N rows of the weight, four a thread, and all of K, 16 columns a thread and step.

    x is int8 [M, K] as words; a thread's 16 columns are of one group.
    """
    THREADS: tl.constexpr = 32 * WARPS
    LANES_N: tl.constexpr = BLOCK_N // 4
    LANES_K: tl.constexpr = THREADS // LANES_N
    thread = tl.arange(0, THREADS)
    four = tl.arange(0, 4)[None, :]
    at_k = thread // LANES_N * 4  # words
    n = thread % LANES_N * 4
    block_n = tl.program_id(0) * BLOCK_N
    w += (block_n // PANEL).to(tl.int64) * (K // 4) * PANEL + block_n % PANEL + n[:, None] + four
    n += block_n
    totals, ones = (), ()
    for _ in tl.static_range(4 * M):
        totals = totals + (tl.zeros((THREADS,), tl.float32 if GROUP > 0 else tl.int32),)
    if ZEROS:
        ones = (tl.full((THREADS,), 0x01010101, tl.int32),)  # a fifth column: the sum of x's own codes
    for start in range(0, K // 4, 4 * LANES_K):
        word = start + at_k
        known = (word < K // 4)[:, None] & (four < 4)
        columns = ()
        for step in tl.static_range(4):
            columns = columns + (_four(tl.load(w + (word + step)[:, None] * PANEL, known, 0)) + ones,)
        if GROUP > 0:
            at_n = (word * 4 // GROUP)[:, None] * PADDED_N + n[:, None] + four
            scales = _four(tl.load(w_scales + at_n, known, 0.0).to(tl.float32))
        if ZEROS and GROUP > 0:
            offsets = _four(tl.load(zeros + at_n, known, 0).to(tl.int32))
        elif ZEROS:
            offsets = _four(tl.load(zeros + n[:, None] + four).to(tl.int32))
        more = ()
        for m in tl.static_range(M):
            rows = _four(tl.load(x + m * (K // 4) + word[:, None] + four, known, 0))
            dots = ()
            for j in tl.static_range(4 + ZEROS):
                dots = dots + (totals[4 * m + j] if GROUP == 0 and j < 4 else tl.zeros((THREADS,), tl.int32),)
            for step in tl.static_range(4):
                dots = _products((rows[step],), columns[step], dots, PTX, 1, 4 + ZEROS)
            for j in tl.static_range(4):
                dot = dots[j]
                if ZEROS:
                    dot -= offsets[j] * dots[4]
                more = more + (totals[4 * m + j] + _small_to_float(dot) * scales[j] if GROUP > 0 else dot,)
        totals = more
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, LANES_N)[:, None] * 4 + four
    for m in tl.static_range(M):
        of_threads = _beside(totals[4 * m], totals[4 * m + 1], totals[4 * m + 2], totals[4 * m + 3])
        value = tl.sum(tl.reshape(of_threads, (LANES_K, LANES_N, 4)), 0).to(tl.float32)
        if GROUP == 0:
            value *= tl.load(w_scales + at).to(tl.float32)
        value *= tl.load(x_scales + m)
        if BIAS:
            value += tl.load(bias + at, at < N, 0.0).to(tl.float32)
        tl.store(out + m * N + at, value.to(out.dtype.element_ty), at < N)


def _variant(
    name: str, function: object, types: dict[str, str], constants: dict[str, int | bool | str | None], config: Config
) -> Variant:
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    sizes = tuple(name for name in ("PADDED_M", "N", "PADDED_N", "K") if name in types)
    constants |= {"PANEL": PANEL, "WARPS": config.num_warps}
    return Variant(name, function, tuple(types.items()), tuple(constants.items()), config, (*pointers, *sizes))


def gemm_variant(
    dtype: str, config: Config, *, scales: str, group: int = 0, zeros: bool = False, bias: str | None = None, ptx: bool
) -> Variant:
    """`dtype` of y, of scales and of bias, in Triton's words; ptx: False for the interpreter, which has none.

    config  TILE_M x TILE_N results a thread, WARPS_N warps side by side, UNROLL words of K at a time
    """
    types = {
        "x": "*i32", "x_scales": "*fp32", "sums": "*i32", "w": "*i32", "w_scales": f"*{scales}", "zeros": "*i8",
        "bias": f"*{bias or dtype}", "out": f"*{dtype}",
        "M": "i32", "PADDED_M": "i32", "N": "i32", "PADDED_N": "i32", "K": "i32",
    }  # fmt: skip
    constants = {
        "GROUP": group, "ZEROS": zeros, "BIAS": bias is not None, "TOGETHER": 8, "PTX": PTX if ptx else None
    }  # fmt: skip
    return _variant("w8a8_dp4a", _gemm, types, constants, config)


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
        "x": "*i32", "x_scales": "*fp32", "w": "*i32", "w_scales": f"*{scales}", "zeros": "*i8",
        "bias": f"*{bias or dtype}", "out": f"*{dtype}", "N": "i32", "PADDED_N": "i32", "K": "i32",
    }  # fmt: skip
    constants = {
        "M": num_tokens, "GROUP": group, "ZEROS": zeros, "BIAS": bias is not None, "PTX": PTX if ptx else None
    }  # fmt: skip
    return _variant("w8a8_gemv", _gemv, types, constants, config)


def gemm_block(config: Config) -> tuple[int, int]:
    """Rows of x and of the weight that a program of `gemm_variant` has."""
    warps_n = config["WARPS_N"]
    return 4 * (config.num_warps // warps_n) * config["TILE_M"], 8 * warps_n * config["TILE_N"]


def gemm_grid(num_tokens: int, num_rows: int, config: Config) -> tuple[int, ...]:
    block_m, block_n = gemm_block(config)
    return (triton.cdiv(num_tokens, block_m) * triton.cdiv(num_rows, block_n),)
