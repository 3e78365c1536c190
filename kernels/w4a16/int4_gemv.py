"""Product of int4 weights and few rows of activations on CUDA cores, for decode where tensor cores do not help.

A weight costs about three instructions, and one multiply-add per token. A code becomes a float without a conversion: a
nibble that is or-ed into a mantissa in place is that code on top of a power of two, and one exact subtraction removes
the power and the zero point. Activations are loaded and widened once for several rows of the weight.

Arithmetic is fp32 whatever the storage: on compute capability 6.1 half precision runs at a 64th of its rate. Only 6.0,
where it runs at twice the rate, multiplies in fp16, and sums in fp16 the few products that a thread has of one group:
codes are taken as multiples of 1 / 128, so that no such sum overflows fp16 unless the activations do.
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
# ruff: noqa: RUF005  Triton extends tuples by addition

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device.dtypes import type_name
from ..device.precision import GEMV_ROWS
from ..launch.compiled_launch import cached, cdiv
from ..launch.variant import Config, Variant
from .packed_int4 import PackedInt4

MAX_TOKENS = GEMV_ROWS
HALF_UNIT = 9 * 2.0**-11  # relative error of an fp16 product, rounded once itself and in at most eight sums


@triton.jit
def _code(packed, nibble: tl.constexpr, zero):
    """Return code - zero point of one of the eight nibbles of a packed word, exactly, in fp32."""
    # The first five nibbles fit into the mantissa in place; the other three are shifted down by 12 bits.
    SHIFT: tl.constexpr = 0 if nibble < 5 else 12
    BIT: tl.constexpr = 4 * nibble - SHIFT
    EXPONENT: tl.constexpr = (150 - BIT) << 23  # bits of 2 ** (23 - BIT), whose unit in the last place is 2 ** -BIT
    above = (((packed >> SHIFT) & (15 << BIT)) | EXPONENT).to(tl.float32, bitcast=True)
    return above - (zero + 2.0 ** (23 - BIT))


@triton.jit
def _code_in_half(packed, nibble: tl.constexpr, zero):
    """Return (code - zero point) / 128 of one of the eight nibbles of a packed word, exactly, in fp16."""
    # A low nibble is or-ed into 8.0, where bit 0 of the mantissa is worth 1 / 128; a high nibble is or-ed into 0.5,
    # where bit 4 of the mantissa is.
    LOW: tl.constexpr = nibble % 2 == 0
    in_place = packed >> (8 * (nibble // 2))
    above = (in_place & (0x000F if LOW else 0x00F0)) | (0x4800 if LOW else 0x3800)
    power = (8.0 if LOW else 0.5) + zero * 0.0078125
    return above.to(tl.int16).to(tl.float16, bitcast=True) - power.to(tl.float16)


@triton.jit(do_not_specialize=("N", "T", "BIASED"))
def _gemv(
    x, words, scales, zeros, bias, out, T, N, K, BIASED,
    M: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, REPEAT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Multiply REPEAT times ROWS rows of the weight with M of the T rows of x, per program.

    A program takes SPAN words of a row at a time, in groups of four that one thread loads: tensors are [ROWS, SPAN //
    4, 4] and [ROWS, SPAN // 4], so that no data moves between threads before the end. BIASED is N, or 0 without a bias.
    """
    NIBBLES: tl.constexpr = 8 * GROUP // 128  # nibbles of a word that belong to one group
    GROUPS: tl.constexpr = 128 // GROUP  # groups per tile
    SUM: tl.constexpr = tl.float16 if HALF else tl.float32
    row = tl.program_id(0) * (ROWS * REPEAT) + tl.arange(0, ROWS)[:, None]
    four = tl.arange(0, SPAN // 4)[None, :]
    word = 4 * (four % 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
    token = tl.program_id(1) * M
    sums = (tl.zeros((ROWS, SPAN // 4), tl.float32),) * (M * REPEAT)
    for start in range(0, K // 128, SPAN // 16):
        tile = start + four // 4 + tl.zeros((ROWS, 1), tl.int32)
        inside = tile < K // 128
        packed = ()
        for repeat in tl.static_range(REPEAT):
            at = tile.to(tl.int64) * N + (row + repeat * ROWS)
            valid = inside & (row + repeat * ROWS < N)
            packed = packed + (tl.load(words + at[:, :, None] * 16 + word, valid[:, :, None], 0),)
        column = tile[:, :, None] * 128 + word
        for group in tl.static_range(GROUPS):
            zero = ()
            scale = ()
            for repeat in tl.static_range(REPEAT):
                which = (tile * GROUPS + group).to(tl.int64) * N + (row + repeat * ROWS)
                which = tl.max_contiguous(which, [1, 1])  # keeps Triton from loading along N, which would move data
                valid = inside & (row + repeat * ROWS < N)
                zero = zero + (tl.load(zeros + which, valid, 0).to(tl.float32),)
                scale = scale + (tl.load(scales + which, valid, 0.0).to(tl.float32),)
            dots = (tl.zeros((ROWS, SPAN // 4, 4), SUM),) * (M * REPEAT)
            for nibble in tl.static_range(group * NIBBLES, (group + 1) * NIBBLES):
                values = ()
                for m in tl.static_range(M):
                    at_x = x + tl.minimum(token + m, T - 1).to(tl.int64) * K + column + 16 * nibble
                    values = values + (tl.load(at_x, inside[:, :, None], 0.0).to(SUM),)
                more = ()
                for repeat in tl.static_range(REPEAT):
                    if HALF:
                        code = _code_in_half(packed[repeat], nibble, zero[repeat][:, :, None])
                    else:
                        code = _code(packed[repeat], nibble, zero[repeat][:, :, None])
                    for m in tl.static_range(M):
                        more = more + (dots[repeat * M + m] + code * values[m],)
                dots = more
            more = ()
            for index in tl.static_range(M * REPEAT):
                dot = tl.sum(dots[index].to(tl.float32), axis=2)
                more = more + (sums[index] + scale[index // M] * (dot * 128.0 if HALF else dot),)
            sums = more
    rows = tl.program_id(0) * (ROWS * REPEAT) + tl.arange(0, ROWS)
    for repeat in tl.static_range(REPEAT):
        this = rows + repeat * ROWS
        added = tl.load(bias + this, this < BIASED, 0.0).to(tl.float32)
        for m in tl.static_range(M):
            result = tl.sum(sums[repeat * M + m], axis=1)
            result += added
            at_out = out + (token + m).to(tl.int64) * N + this
            tl.store(at_out, result.to(out.dtype.element_ty), (this < N) & (token + m + 0 * this < T))


@cached
def gemv_variant(
    dtype: str, num_tokens: int, group_size: int, config: Config, *, scales: str, bias: str | None, half: bool = False
) -> Variant:
    """Return the compiled variant of the product on CUDA cores.

    dtype, scales, bias  Triton type names of x and the result, of the scales, and of the bias; without a bias the same
                         kernel is used
    num_tokens           tokens per program, up to MAX_TOKENS; weights are read once for each such group of tokens
    half                 whether to multiply in fp16; then dtype must be fp16
    config               ROWS of the weight that a program holds at a time, REPEAT such groups of rows; its warps
                         determine SPAN
    """
    types = {
        "x": f"*{dtype}", "words": "*i32", "scales": f"*{scales}", "zeros": "*i8",
        "bias": f"*{bias or dtype}", "out": f"*{dtype}", "T": "i32", "N": "i32", "K": "i32", "BIASED": "i32",
    }  # fmt: skip
    constants = {"M": num_tokens, "GROUP": group_size, "HALF": half, "SPAN": _span(config)}
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    return Variant("w4a16_gemv", _gemv, tuple(types.items()), tuple(constants.items()), config, (*pointers, "K"))


def _span(config: Config) -> int:
    """SPAN of a config: words of a row that a program takes at a time, four per thread."""
    return 128 * config.num_warps // config.number("ROWS")


def tokens_at_once(num_tokens: int) -> int:
    """Tokens per program: `num_tokens` divided as evenly as MAX_TOKENS allows."""
    lots = -(-num_tokens // MAX_TOKENS)
    return -(-num_tokens // lots)


def gemv_grid(num_tokens: int, num_rows: int, config: Config) -> tuple[int, int]:
    lots = cdiv(num_tokens, tokens_at_once(num_tokens))
    return cdiv(num_rows, config["ROWS"] * config["REPEAT"]), lots


def gemv(x: torch.Tensor, weight: PackedInt4, config: Config, *, half: bool = False) -> torch.Tensor:
    """Return y [M, N] = x [M, K] @ w.T + bias in the dtype of x, which must be contiguous.

    half  whether to multiply in fp16
    """
    (num_rows, num_columns), num_tokens, bias = weight.shape, x.shape[0], weight.bias
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    variant = gemv_variant(
        type_name(x), tokens_at_once(num_tokens), weight.group_size, config,
        scales=type_name(weight.scales), bias=None if bias is None else type_name(bias), half=half,
    )  # fmt: skip
    given, biased = (x, 0) if bias is None else (bias, num_rows)
    arguments = (x, weight.words, weight.scales, weight.zeros, given, out)
    variant.launch(gemv_grid(num_tokens, num_rows, config), *arguments, num_tokens, num_rows, num_columns, biased)
    return out
