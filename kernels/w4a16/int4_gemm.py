"""Product of int4 weights and up to 64 rows of activations with `tl.dot` on tensor cores, from compute capability 8.0.

The weights are the rows of the product, so that even a few tokens fill a tensor core, and capability 9.0 gets the 64
rows that wgmma needs. Codes become half-precision numbers two at a time: they are or-ed into the mantissa of a power of
two, and one exact subtraction removes that power and the zero point. A group's products are summed in fp32 before the
scale is applied, so that nothing is rounded that the checkpoint did not round.

Where few blocks of rows would leave SMs idle, K is split: each part writes its sums, and a second kernel adds them in a
fixed order, so that a result does not depend on the order in which programs finish.
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device.dtypes import type_name
from ..device.precision import GEMM_ROWS
from ..launch.compiled_launch import cached, cdiv
from ..launch.variant import Config, Constant, Variant
from ..pointwise.split_k import split_k_grid, split_k_variant
from .packed_int4 import PackedInt4

MAX_TOKENS = GEMM_ROWS


# PTX that turns nibble j of two words into two half-precision numbers: the code on top of 2**10 (fp16) or 2**7 (bf16),
# minus that power and the zero point. One instruction per line, since aot.py counts lines.
def _unpacking(nibble: int, half: str, last: str) -> str:
    lines = (
        "{ .reg .b32 pair, one, negative;",
        f"prmt.b32 pair, $1, $2, {0x5410 if nibble < 4 else 0x7632:#x};",
        f"shr.u32 pair, pair, {4 * (nibble % 4)};",
        f"lop3.b32 pair, pair, 0x000f000f, {half}, 0xea;",
        last,
        "}",
    )
    return "\n".join(lines)


_SUBTRACT = "sub.f16x2 $0, pair, $3;"
_SUBTRACT_BF16 = "\n".join(  # capability 8.0 has no bf16 subtraction, only fused multiply-adds
    ("xor.b32 negative, $3, 0x80008000;", "mov.b32 one, 0x3f803f80;", "fma.rn.bf16x2 $0, pair, one, negative;")
)
_FP16 = tuple(_unpacking(nibble, "0x64006400", _SUBTRACT) for nibble in range(8))
_BF16 = tuple(_unpacking(nibble, "0x43004300", _SUBTRACT_BF16) for nibble in range(8))
PTX = {"fp16": _FP16, "bf16": _BF16}


@triton.jit
def _code(packed, nibble: tl.constexpr, offset, PTX: tl.constexpr):
    """Return code - zero point of one of the eight nibbles of a packed word, in the dtype of `offset`.

    `offset` is the power of two onto which the code is or-ed, plus the zero point.
    """
    if PTX is None:
        power = 1024.0 if offset.dtype == tl.float16 else 128.0
        code = ((packed >> (4 * nibble)) & 15).to(tl.float32) + power
        return (code - offset.to(tl.float32)).to(offset.dtype)
    return tl.inline_asm_elementwise(
        PTX[nibble], "=r,r,r,r", [packed, offset], dtype=offset.dtype, is_pure=True, pack=2
    )


@triton.jit(do_not_specialize=("M", "BIASED"))
def _gemm(
    x, words, scales, zeros, bias, out, M, N, K, BIASED,
    GROUP: tl.constexpr, PTX: tl.constexpr, PARTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of the weight with BLOCK_M rows of x over one part of K, per program.

    PARTED  whether K is split; then `out` is fp32 [parts, M, N], and the kernel that adds the parts adds the bias
    BIASED  N, or 0 without a bias
    """
    NIBBLES: tl.constexpr = 8 * GROUP // 128  # nibbles of a word that belong to one group
    GROUPS: tl.constexpr = 128 // GROUP  # groups per tile
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    lane = tl.arange(0, 16)
    power = 1024.0 if x.dtype.element_ty == tl.float16 else 128.0
    per_part = tl.cdiv(K // 128, tl.num_programs(2)) if PARTED else K // 128
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(part * per_part, tl.minimum((part + 1) * per_part, K // 128)):
        at = tile * N.to(tl.int64) + rows
        packed = tl.load(words + at[:, None] * 16 + lane[None, :], (rows < N)[:, None], 0)
        for group in tl.static_range(GROUPS):
            which = (tile * GROUPS + group) * N.to(tl.int64) + rows
            scale = tl.load(scales + which, rows < N, 0.0).to(tl.float32)
            zero = tl.load(zeros + which, rows < N, 0).to(tl.float32)
            offset = (zero + power).to(x.dtype.element_ty)[:, None] + tl.zeros((BLOCK_N, 16), x.dtype.element_ty)
            dots = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for nibble in tl.static_range(group * NIBBLES, (group + 1) * NIBBLES):
                column = tile * 128 + 16 * nibble + lane
                at_x = x + tokens[None, :].to(tl.int64) * K + column[:, None]
                values = tl.load(at_x, (tokens < M)[None, :], 0.0)
                dots = tl.dot(_code(packed, nibble, offset, PTX), values, dots)
            total += dots * scale[:, None]
    if PARTED:
        out += part.to(tl.int64) * M * N
    else:
        total += tl.load(bias + rows, rows < BIASED, 0.0).to(tl.float32)[:, None]
    at_out = out + tokens[None, :].to(tl.int64) * N + rows[:, None]
    tl.store(at_out, total.to(out.dtype.element_ty), (tokens < M)[None, :] & (rows < N)[:, None])


@cached
def gemm_variants(
    dtype: str, group_size: int, config: Config, *, scales: str, bias: str | None, ptx: bool
) -> tuple[Variant, ...]:
    """Return the compiled variants of the product: one, or with SPLITS above 1 a second one that adds the parts of K.

    dtype, scales, bias  Triton type names of x and the result, of the scales, and of the bias; without a bias the same
                         kernel is used
    config               BLOCK_N rows of the weight, BLOCK_M rows of x, SPLITS of K
    ptx                  whether to use inline PTX; Triton's interpreter does not support it
    """
    split = config["SPLITS"] > 1
    types = {
        "x": f"*{dtype}", "words": "*i32", "scales": f"*{scales}", "zeros": "*i8", "bias": f"*{bias or dtype}",
        "out": "*fp32" if split else f"*{dtype}", "M": "i32", "N": "i32", "K": "i32", "BIASED": "i32",
    }  # fmt: skip
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    constants: dict[str, Constant] = {"GROUP": group_size, "PARTED": split}
    constants["PTX"] = PTX[dtype] if ptx else None
    own, aligned = config.without("SPLITS"), (*pointers, "N", "K")
    product = Variant("w4a16_gemm", _gemm, tuple(types.items()), tuple(constants.items()), own, aligned)
    if not split:
        return (product,)
    return product, split_k_variant("w4a16_add_parts", dtype, config["SPLITS"], bias=bias)


def gemm_grids(num_tokens: int, num_rows: int, config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the launch grids of the product and of the kernel that adds the parts of K, in this order."""
    blocks = cdiv(num_rows, config["BLOCK_N"]), cdiv(num_tokens, config["BLOCK_M"]), config["SPLITS"]
    return blocks, split_k_grid(num_tokens, num_rows)


def gemm(x: torch.Tensor, weight: PackedInt4, config: Config) -> torch.Tensor:
    """Return y [M, N] = x [M, K] @ w.T + bias in the dtype of x, fp16 or bf16.

    x must be contiguous and N a multiple of 16.
    """
    (num_rows, num_columns), num_tokens, bias = weight.shape, x.shape[0], weight.bias
    variants = gemm_variants(
        type_name(x), weight.group_size, config, scales=type_name(weight.scales),
        bias=None if bias is None else type_name(bias), ptx=x.is_cuda,
    )  # fmt: skip
    grids = gemm_grids(num_tokens, num_rows, config)
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    given, biased = (x, 0) if bias is None else (bias, num_rows)
    arguments = (x, weight.words, weight.scales, weight.zeros, given)
    if len(variants) == 1:
        variants[0].launch(grids[0], *arguments, out, num_tokens, num_rows, num_columns, biased)
        return out
    parts = torch.empty((config["SPLITS"], num_tokens, num_rows), dtype=torch.float32, device=x.device)
    variants[0].launch(grids[0], *arguments, parts, num_tokens, num_rows, num_columns, biased)
    variants[1].launch(grids[1], parts, given, out, num_tokens, num_rows, biased)
    return out
