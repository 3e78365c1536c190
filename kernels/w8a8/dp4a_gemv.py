"""int8 product of up to 8 rows of activations by dp4a, below capability 8.0: bound by memory bandwidth.

Weights are in the panels that dp4a_gemm.py describes. A thread has four rows of the weight, side by side in a panel,
and every n-th span of their columns, 16 to 64 columns long. For 16 columns it loads 64 bytes of weights in four loads,
and 16 bytes of each row of x in one, for 16 dp4a per row. The sums that the threads of a block have of the same rows
are added at the end. Groups are scaled in fp32, once for all columns of a span that belong to one group; without groups
everything is added in int32.
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment,index,misc,var-annotated"
# ruff: noqa: RUF005  Triton extends tuples by addition

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device.dtypes import type_name
from ..launch.compiled_launch import cached, cdiv
from ..launch.variant import Config, Variant
from .dp4a_gemm import PTX, beside, dp4a_variant, four, in_panels, products
from .packed_int8 import PanelsInt8
from .quantize_panels import PANEL
from .quantize_rows import QuantizedRows

MAX_ROWS = 8  # rows of x
# Load of four words through the read-only cache, 16 columns further on for each i. It is inline PTX since Triton would
# move four zeros before each load and compute an address for each.
_LOAD = "ld.global.nc.v4.b32 {{{}, {}, {}, {}}}, [{}+{}];"
_MAX_SIXTEENS = 4  # 16-column pieces per span at most
LOAD = tl.constexpr(tuple(_LOAD.format("$0", "$1", "$2", "$3", "$4", 16 * i) for i in range(_MAX_SIXTEENS)))
# Loads of a panel's words for 16 columns: four words for each of four steps, which are PANEL words apart.
LOADS = tl.constexpr(
    tuple(
        "\n".join(
            _LOAD.format(*(f"${4 * step + j}" for j in range(4)), "$16", 4 * PANEL * (4 * i + step))
            for step in range(4)
        )
        for i in range(_MAX_SIXTEENS)
    )
)
# Load of four zero points, one byte each, as int32.
LOAD_BYTES = tl.constexpr("ld.global.nc.v4.s8 {$0, $1, $2, $3}, [$4];")
MAGIC = tl.constexpr(0x4B400000)  # bits of fp32 12,582,912, whose unit in the last place is one, as in `small_to_float`
MAGIC_FLOAT = tl.constexpr(12582912.0)


@triton.jit
def _first(pointers):
    """Return the first of the four neighbouring pointers in [T, 4], as an integer [T]."""
    first, _, _, _ = four(pointers.to(tl.int64))
    return first


@triton.jit
def _of_x(start, valid, SIXTEEN: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr):
    """Load four words [T] each of x, SIXTEEN times 16 columns beyond the pointers [T, 4].

    With MASKED, words are zeros where `valid` [T] is false.
    """
    if MASKED:
        words = four(tl.load(start + 4 * SIXTEEN, valid[:, None], 0))
    elif PTX is None:
        words = four(tl.load(start + 4 * SIXTEEN))
    else:
        words = tl.inline_asm_elementwise(
            LOAD[SIXTEEN], "=r,=r,=r,=r,l", [_first(start)], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    return words


@triton.jit
def _of_weight(start, valid, SIXTEEN: tl.constexpr, PANEL: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr):
    """Load 16 words [T] each of four rows of a panel: the words of each four columns after those of the four before.

    They lie SIXTEEN times 16 columns beyond the pointers [T, 4]; with MASKED, words are zeros where `valid` [T] is
    false.
    """
    if MASKED or PTX is None:
        words = ()
        for step in tl.static_range(4):
            at = start + (4 * SIXTEEN + step) * PANEL
            words = words + four(tl.load(at, valid[:, None], 0) if MASKED else tl.load(at))
    else:
        words = tl.inline_asm_elementwise(
            LOADS[SIXTEEN], "=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,l", [_first(start)],
            dtype=(tl.int32,) * 16, is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def _zeros(start, valid, MASKED: tl.constexpr, PTX: tl.constexpr):
    """Load four zero points int32 [T] at the pointers [T, 4]; with MASKED, zeros where `valid` [T] is false."""
    if MASKED:
        found = four(tl.load(start, valid[:, None], 0).to(tl.int32))
    elif PTX is None:
        found = four(tl.load(start).to(tl.int32))
    else:
        found = tl.inline_asm_elementwise(
            LOAD_BYTES, "=r,=r,=r,=r,l", [_first(start)], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    return found


@triton.jit
def _more(
    totals, x, w, w_scales, zeros, K, PADDED_N, end,
    M: tl.constexpr, GROUP: tl.constexpr, ONES: tl.constexpr, PANEL: tl.constexpr, PTX: tl.constexpr,
    SPAN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return totals plus the products of the next SPAN columns of each thread.

    x and w are pointers [T, 4] to the first words of x's first row and of the weight.

    end  [T], number of words of a row that remain from there, if MASKED
    """
    THREADS: tl.constexpr = x.shape[0]
    PART: tl.constexpr = SPAN if GROUP == 0 or GROUP > SPAN else GROUP  # columns that belong to one group
    for part in tl.static_range(SPAN // PART):
        dots, of_x = (), ()
        for m in tl.static_range(M):
            for j in tl.static_range(4):
                dots = dots + (tl.full((THREADS,), MAGIC, tl.int32) if GROUP > 0 else totals[4 * m + j],)
            of_x = of_x + (tl.zeros((THREADS,), tl.int32),)
        for sixteen in tl.static_range(part * PART // 16, (part + 1) * PART // 16):
            valid = 4 * sixteen < end if MASKED else None
            columns = _of_weight(w, valid, sixteen, PANEL, MASKED, PTX)
            more, sums = (), ()
            for m in tl.static_range(M):
                rows = _of_x(x + m * (K // 4), valid, sixteen, MASKED, PTX)
                own, added = (dots[4 * m], dots[4 * m + 1], dots[4 * m + 2], dots[4 * m + 3]), (of_x[m],)
                for step in tl.static_range(4):
                    of_step = (columns[4 * step], columns[4 * step + 1], columns[4 * step + 2], columns[4 * step + 3])
                    own = products((rows[step],), of_step, own, PTX, 1, 4)
                    if ONES:
                        added = products((rows[step],), (tl.full((THREADS,), -1, tl.int32),), added, PTX, 1, 1)
                more, sums = more + own, sums + added
            dots, of_x = more, sums
        if GROUP > 0:
            valid = part * PART // 4 < end if MASKED else None
            at = part * PADDED_N
            scales = four(tl.load(w_scales + at, valid[:, None], 0.0) if MASKED else tl.load(w_scales + at))
            offsets = scales
            if ONES:
                offsets = _zeros(zeros + at, valid, MASKED, PTX)
            scaled = ()
            for m in tl.static_range(M):
                for j in tl.static_range(4):
                    dot = dots[4 * m + j]
                    if ONES:
                        dot += offsets[j] * of_x[m]
                    value = dot.to(tl.float32, bitcast=True) - MAGIC_FLOAT
                    scaled = scaled + (totals[4 * m + j] + value * scales[j].to(tl.float32),)
            dots = scaled
        totals = dots
    return totals


@triton.jit(do_not_specialize=("BIASED",))
def _gemv(
    x, x_scales, sums, w, w_scales, zeros, bias, out, N, PADDED_N, K, BIASED,
    M: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, PANEL: tl.constexpr, SPAN: tl.constexpr,
    PTX: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of y per program, four per thread, over all of K, SPAN columns per thread and step.

    x is int8 [M, K] as words; a thread's columns of a step belong to one group, or to whole groups. To correct zero
    points of groups, the negated sum of x's codes is computed as one more column of the product, of codes -1; for
    scales of whole rows `sums` has the sum. BIASED is N, or 0 without a bias.

    The columns of K beyond whole steps of all threads are processed after the loop, so that nothing in the loop is
    masked: four masked words take five instructions to load.
    """
    ONES: tl.constexpr = 1 if ZEROS and GROUP > 0 else 0
    THREADS: tl.constexpr = 32 * WARPS
    LANES_N: tl.constexpr = BLOCK_N // 4
    LANES_K: tl.constexpr = THREADS // LANES_N
    STEP: tl.constexpr = LANES_K * SPAN // 4  # in words of a row
    tl.static_assert(GROUP == 0 or 4 * STEP % GROUP == 0)
    thread = tl.arange(0, THREADS)
    column = tl.arange(0, 4)[None, :]
    at_k = thread // LANES_N * (SPAN // 4)  # in words
    n = thread % LANES_N * 4
    block_n = tl.program_id(0) * BLOCK_N
    w += in_panels(block_n, n, K, PANEL) + at_k[:, None] * PANEL
    x += tl.max_contiguous(tl.multiple_of(at_k[:, None] + column, (1, 4)), (1, 4))
    at_n = at_k[:, None] * 4 // (GROUP if GROUP > 0 else 4 * STEP) * PADDED_N + block_n + n[:, None] + column
    w_scales_at, zeros_at = w_scales + at_n, zeros + at_n
    x_at, w_at = x, w
    totals = ()
    for _ in tl.static_range(4 * M):
        totals = totals + (tl.zeros((THREADS,), tl.float32 if GROUP > 0 else tl.int32),)
    steps = K // 4 // STEP
    groups = 4 * STEP // GROUP * PADDED_N if GROUP > 0 else 0
    for _ in range(0, steps):
        totals = _more(
            totals, x_at, w_at, w_scales_at, zeros_at, K, PADDED_N, None, M, GROUP, ONES, PANEL, PTX, SPAN, False
        )  # fmt: skip
        x_at += STEP
        w_at += STEP * PANEL
        w_scales_at += groups
        zeros_at += groups
    end = K // 4 - steps * STEP - at_k
    at_n += steps * groups
    # Computed from the first addresses, so that the loop keeps only one set of addresses.
    totals = _more(
        totals, x + steps * STEP, w + steps * STEP * PANEL, w_scales + at_n, zeros + at_n, K, PADDED_N, end,
        M, GROUP, ONES, PANEL, PTX, SPAN, True,
    )  # fmt: skip
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


@cached
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
    """Return the compiled variant of the dp4a product for up to MAX_ROWS tokens.

    dtype, scales, bias  Triton type names of y, of the scales and of the bias
    ptx                  whether to use inline PTX; Triton's interpreter does not support it
    config               BLOCK_N rows of the weight, 32 to 128
    """
    types = {
        "x": "*i32", "x_scales": "*fp32", "sums": "*i32", "w": "*i32", "w_scales": f"*{scales}", "zeros": "*i8",
        "bias": f"*{bias or dtype}", "out": f"*{dtype}", "N": "i32", "PADDED_N": "i32", "K": "i32",
        "BIASED": "i32",
    }  # fmt: skip
    constants = {
        "M": num_tokens, "GROUP": group, "ZEROS": zeros, "SPAN": span(num_tokens, group), "PTX": PTX if ptx else None
    }  # fmt: skip
    return dp4a_variant("w8a8_gemv", _gemv, types, constants, config)


def span(num_tokens: int, group: int) -> int:
    """Columns per thread and step; they belong to one group, or to whole groups if these are small."""
    if group == 0:
        return 32 if num_tokens <= 2 else 16
    return 64 if num_tokens <= 4 else 32


def gemv_grid(num_rows: int, config: Config) -> tuple[int, ...]:
    return (cdiv(num_rows, config["BLOCK_N"]),)


def gemv(x: QuantizedRows, weight: PanelsInt8, dtype: torch.dtype, config: Config) -> torch.Tensor:
    """Return y [M, N] in `dtype`, for M up to MAX_ROWS.

    If the weight has zero points for whole rows, x must have the sums of its rows.
    """
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
