"""int4 weights times fp16 or bf16 activations: the product of few rows, as decoding has it.

Layout, made once at load. K is cut into tiles of 128 columns, 16 int32 words a row each; the eight nibbles of a
word belong to columns 16 apart:

    word i of a tile:  nibble j is column 16 * j + i

so that one shift and mask of a whole vector of words gives neighbouring columns, whose activations are one
contiguous load, and no group of 16, 32, 64 or 128 columns is split between nibbles of one word.

Codes become floats without a conversion: or-ed into the mantissa of 2**23, and 2**23 taken off. Zero points are
applied to the sum of a group's activations, not to each weight. All arithmetic is fp32 whatever the storage: on
compute capability 6.1 half precision runs at a 64th of its rate, and elsewhere this kernel waits for memory.
"""

# What is inside a kernel is Triton's language, of which type checkers know nothing.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
# ruff: noqa: RUF005  tuples grow by addition there

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .variant import Config, Variant, type_name
from .weights import GroupedWeight

TILE = 128  # columns
WORDS = 16  # of a tile's row
GROUP_SIZES = (16, 32, 64, 128)
MAX_ROWS = 8


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """w = scale * (code - zero).

    words   int32 [N, K // 8]
    scales  [N, K // group_size] in the checkpoint's own dtype
    zeros   likewise: whole numbers up to 16
    bias    [N] or None
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int
    bias: torch.Tensor | None = None


def pack(weight: GroupedWeight) -> PackedInt4:
    """Of a weight whose columns are in order of its groups. Groups above 128 columns repeat their scale.

    Raises ValueError for shapes that do not fit the tiles.
    """
    num_rows, num_columns = weight.shape
    if weight.bits != 4 or num_columns % TILE:
        raise ValueError(f"int4 tiles take 4 bits and a K in {TILE}s, not {weight.bits} bits and K {num_columns}")
    repeats = max(1, weight.group_size // TILE)
    group = weight.group_size // repeats
    if group not in GROUP_SIZES or group * repeats != weight.group_size:
        raise ValueError(f"group_size: {weight.group_size} is none of {GROUP_SIZES} nor a multiple of {TILE}")
    tiles = weight.codes.to(torch.int32).view(num_rows, num_columns // TILE, 8, WORDS)
    shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=tiles.device).view(1, 1, 8, 1)
    words = (tiles.to(torch.int64) << shifts).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    scales = weight.scales.repeat_interleave(repeats, dim=1).contiguous()
    zeros = weight.zeros.to(scales.dtype).repeat_interleave(repeats, dim=1).contiguous()
    return PackedInt4(words.view(num_rows, -1), scales, zeros, group, weight.bias)


@triton.jit
def _gemv(
    x,
    words,
    scales,
    zeros,
    bias,
    out,
    N,
    K: tl.constexpr,
    M: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Each program: ROWS rows of the weight, SPAN words of each at a time, for all M rows of x.

    All tensors have the shape of the packed words, so that none changes hands between threads before the end.
    """
    NIBBLES: tl.constexpr = 8 * GROUP // 128  # of a word, in one group
    GROUPS: tl.constexpr = 128 // GROUP  # of a tile
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = (row < N)[:, None]
    wide = row[:, None].to(tl.int64)
    sums = (tl.zeros((ROWS, SPAN), tl.float32),) * M
    for start in range(0, K // 8, SPAN):
        at = start + tl.arange(0, SPAN)[None, :] + tl.zeros((ROWS, 1), tl.int32)
        inside = known & (at < K // 8)
        packed = tl.load(words + wide * (K // 8) + at, inside, 0)
        tile = at // 16
        column = tile * 128 + at % 16
        for group in tl.static_range(GROUPS):
            which = wide * (K // GROUP) + tile * GROUPS + group
            scale = tl.load(scales + which, inside, 0.0).to(tl.float32)
            zero = tl.load(zeros + which, inside, 0.0).to(tl.float32)
            dots = (tl.zeros((ROWS, SPAN), tl.float32),) * M
            totals = (tl.zeros((ROWS, SPAN), tl.float32),) * M
            for nibble in tl.static_range(group * NIBBLES, (group + 1) * NIBBLES):
                code = (((packed >> (4 * nibble)) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
                more_dots = ()
                more_totals = ()
                for m in tl.static_range(M):
                    value = tl.load(x + m * K + column + 16 * nibble, at < K // 8, 0.0).to(tl.float32)
                    more_dots = more_dots + (dots[m] + code * value,)
                    more_totals = more_totals + (totals[m] + value,)
                dots = more_dots
                totals = more_totals
            more = ()
            for m in tl.static_range(M):
                more = more + (sums[m] + scale * (dots[m] - zero * totals[m]),)
            sums = more
    for m in tl.static_range(M):
        result = tl.sum(sums[m], axis=1)
        if BIAS:
            result += tl.load(bias + row, row < N, 0.0).to(tl.float32)
        tl.store(out + m * N + row, result.to(out.dtype.element_ty), row < N)


def gemv_variant(
    dtype: str, num_columns: int, num_tokens: int, group_size: int, config: Config, *, scales: str, bias: str | None
) -> Variant:
    """`dtype`, `scales`, `bias`: of x and the result, of the scales, of the bias, in Triton's words.

    config  ROWS of the weight for a program, SPAN words of a row at a time
    """
    types = {
        "x": f"*{dtype}", "words": "*i32", "scales": f"*{scales}", "zeros": f"*{scales}",
        "bias": f"*{bias or dtype}", "out": f"*{dtype}", "N": "i32",
    }  # fmt: skip
    constants = {"K": num_columns, "M": num_tokens, "GROUP": group_size, "BIAS": bias is not None}
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    return Variant("w4a16_gemv", _gemv, tuple(types.items()), tuple(constants.items()), config, pointers)


def gemv(x: torch.Tensor, weight: PackedInt4, config: Config) -> torch.Tensor:
    """y [M, N] = x [M, K] @ w.T + bias for M up to MAX_ROWS; in the dtype of x."""
    num_rows, bias = weight.words.shape[0], weight.bias
    out = torch.empty((x.shape[0], num_rows), dtype=x.dtype, device=x.device)
    variant = gemv_variant(
        type_name(x), x.shape[1], x.shape[0], weight.group_size, config,
        scales=type_name(weight.scales), bias=None if bias is None else type_name(bias),
    )  # fmt: skip
    grid = (triton.cdiv(num_rows, config["ROWS"]),)
    variant.launch(grid, x, weight.words, weight.scales, weight.zeros, x if bias is None else bias, out, num_rows)
    return out
