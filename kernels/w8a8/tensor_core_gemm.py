"""Product of 8-bit rows with 8-bit rows on tensor cores, from capability 8.0 (int8) and 8.9 (fp8).

It is the product of int8_product.py and fp8_product.py:

    y[m, n] = x_scales[m] * sum over groups g of scale(n, g) * (dot of group g - zero[g, n] * sum of group g of x[m])

With scales of whole rows there is one group: the tensor cores sum over all of K. Otherwise each group is a product of
its own, in int32 or fp32, which is scaled and added in fp32. Both operands are contiguous along K, as mma.sync and
wgmma read 8-bit operands.

With few rows of x the operands are swapped: the weights are then the rows of the product, so that the 64 rows that
wgmma needs always exist. Where few blocks would leave SMs idle, K is split: each part leaves its sums in fp32, and a
second kernel adds them in order, so that the result does not depend on the order in which programs finish.

For fp8 on capability 9.0, wgmma sums in fewer bits than fp32 has (Zhao et al., "Insights into DeepSeek-V3", 2025), so
its sums are added to fp32 every 128 columns.
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..device.dtypes import type_name
from ..device.precision import PrecisionPolicy
from ..launch.compiled_launch import cached, cdiv
from ..launch.kernel_operation import KernelLaunch
from ..launch.variant import Config, Variant
from ..pointwise.split_k import split_k_grid, split_k_variant
from .quantize_rows import QuantizedRows

TOGETHER = 8  # blocks of rows that share a block of weights while it is in L2


@dataclass(frozen=True, slots=True)
class PackedRows8:
    """Packed 8-bit weight in rows.

    codes   int8 or fp8 e4m3 [N, K]
    scales  [groups of K, N // share], floating point
    zeros   int8 [groups of K, N] or None
    group   columns per group; 0 where all of K is one group
    share   number of neighbouring rows that have one scale in common
    bias    [N] or None
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group: int = 0
    share: int = 1
    bias: torch.Tensor | None = None


@triton.jit(do_not_specialize=("M", "BIASED"))
def _multiply(
    x, x_scales, sums, w, w_scales, zeros, bias, out, M, N, K, BIASED,
    GROUP: tl.constexpr, SHARE: tl.constexpr, ZEROS: tl.constexpr, FP8: tl.constexpr,
    EVEN: tl.constexpr, TOGETHER: tl.constexpr, SWAP: tl.constexpr, PARTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one block of y over one part of K per program.

    PARTED means that K is split; `out` is then fp32 [parts, M, N]. BIASED is N, or 0 without a bias. m and n are column
    and row vectors of indices, or, with SWAP, row and column vectors.
    """
    blocks_m = tl.cdiv(M, BLOCK_M)
    band = TOGETHER * tl.cdiv(N, BLOCK_N)
    first_m = tl.program_id(0) // band * TOGETHER
    height = tl.minimum(blocks_m - first_m, TOGETHER)
    inside = tl.program_id(0) % band
    rows = (first_m + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = inside // height * BLOCK_N
    columns = first_n + tl.arange(0, BLOCK_N)
    m = rows[None, :] if SWAP else rows[:, None]
    n = columns[:, None] if SWAP else columns[None, :]
    at = tl.arange(0, BLOCK_K)
    # Rows beyond the last read the last row again and are not stored, so that loads along K need no mask.
    x += tl.minimum(rows, M - 1).to(tl.int64)[:, None] * K + at[None, :]
    w += tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + at[None, :]
    of_n = tl.minimum(n, N - 1)
    of_m = tl.minimum(m, M - 1)
    steps = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(steps, tl.num_programs(1)) if PARTED else steps
    part = tl.program_id(1)
    NUMBER: tl.constexpr = tl.float32 if FP8 else tl.int32
    HEIGHT: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    dots = tl.zeros((HEIGHT, WIDTH), NUMBER)
    for step in range(part * each, tl.minimum((part + 1) * each, steps)):
        start = step * BLOCK_K
        if GROUP > 0:  # loaded early: Triton prefetches only operands of the product
            if SHARE % BLOCK_N == 0:
                scale = tl.load(w_scales + step * tl.cdiv(N, SHARE) + first_n // SHARE).to(tl.float32)
            else:
                scale = tl.load(w_scales + step * tl.cdiv(N, SHARE) + of_n // SHARE).to(tl.float32)
        if GROUP > 0 and ZEROS:
            zero = tl.load(zeros + step * N + of_n).to(tl.int32)
            of_x = tl.load(sums + step * M + of_m)
        if EVEN:
            a = tl.load(x + start)
            b = tl.load(w + start)
        else:
            a = tl.load(x + start, (start + at < K)[None, :], 0.0)
            b = tl.load(w + start, (start + at < K)[None, :], 0.0)
        if SWAP:
            first, second = b, tl.trans(a)
        else:
            first, second = a, tl.trans(b)
        if GROUP > 0:
            dots = tl.dot(first, second, out_dtype=NUMBER)
            if ZEROS:
                dots -= zero * of_x
            total += dots.to(tl.float32) * scale
        elif FP8:
            dots = tl.dot(first, second, dots, max_num_imprecise_acc=128 if BLOCK_K >= 128 else BLOCK_K)
        else:
            dots = tl.dot(first, second, dots, out_dtype=tl.int32)
    if GROUP == 0:
        if ZEROS and not PARTED:
            dots -= tl.load(zeros + of_n).to(tl.int32) * tl.load(sums + of_m)
        elif ZEROS:
            dots -= tl.where(part == 0, tl.load(zeros + of_n).to(tl.int32) * tl.load(sums + of_m), 0)
        total = dots.to(tl.float32) * tl.load(w_scales + of_n // SHARE).to(tl.float32)
    total *= tl.load(x_scales + of_m)
    if PARTED:
        out += part.to(tl.int64) * M * N
    else:
        total += tl.load(bias + n, n < BIASED, 0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * N + n, total.to(out.dtype.element_ty), (m < M) & (n < N))


@cached
def multiply_variants(
    dtype: str,
    num_columns: int,
    config: Config,
    *,
    fp8: bool,
    scales: str = "fp32",
    group: int = 0,
    share: int = 1,
    zeros: bool = False,
    bias: str | None = None,
) -> tuple[Variant, ...]:
    """Return the compiled variants: the product, and, where K is split, the kernel that adds the parts.

    dtype, scales, bias  Triton type names of y, of the scales and of the bias; without a bias the same kernels are used
    config               BLOCK_M rows of x, BLOCK_N rows of w, BLOCK_K columns (a group, where there are groups), SWAP,
                         SPLIT
    """
    split = config["SPLIT"] > 1
    code = "*fp8e4nv" if fp8 else "*i8"
    types = {
        "x": code, "x_scales": "*fp32", "sums": "*i32", "w": code, "w_scales": f"*{scales}", "zeros": "*i8",
        "bias": f"*{bias or dtype}", "out": "*fp32" if split else f"*{dtype}", "M": "i32", "N": "i32", "K": "i32",
        "BIASED": "i32",
    }  # fmt: skip
    constants = {
        "GROUP": group, "SHARE": share, "ZEROS": zeros, "FP8": fp8,
        "EVEN": num_columns % config["BLOCK_K"] == 0, "TOGETHER": TOGETHER, "PARTED": split,
    }  # fmt: skip
    aligned = (*(name for name, kind in types.items() if kind.startswith("*")), "N", "K")
    name = "fp8" if fp8 else "w8a8_tensor"
    product = Variant(name, _multiply, tuple(types.items()), tuple(constants.items()), config.without("SPLIT"), aligned)
    if not split:
        return (product,)
    adding = split_k_variant(f"{name}_add", dtype, config["SPLIT"], bias=bias)
    return product, adding


def multiply_grids(num_tokens: int, num_rows: int, config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the launch grids of the product and of the kernel that adds the parts of K, in this order."""
    blocks = cdiv(num_tokens, config["BLOCK_M"]) * cdiv(num_rows, config["BLOCK_N"])
    return (blocks, config["SPLIT"]), split_k_grid(num_tokens, num_rows)


def multiply(x: QuantizedRows, weight: PackedRows8, dtype: torch.dtype, config: Config) -> torch.Tensor:
    """Return y [M, N] in `dtype`. If the weight has zero points, x must have the sums of its groups.

    Raises ValueError for a config whose BLOCK_K is not the group.
    """
    (num_rows, num_columns), num_tokens = weight.codes.shape, x.codes.shape[0]
    if weight.group and weight.group != config["BLOCK_K"]:
        raise ValueError(f"BLOCK_K: {config['BLOCK_K']} is not the weight's group size, {weight.group}")
    device, bias = x.codes.device, weight.bias
    out = torch.empty((num_tokens, num_rows), dtype=dtype, device=device)
    made = multiply_variants(
        type_name(out), num_columns, config, fp8=x.codes.dtype != torch.int8, scales=type_name(weight.scales),
        group=weight.group, share=weight.share, zeros=weight.zeros is not None,
        bias=None if bias is None else type_name(bias),
    )  # fmt: skip
    blocks = multiply_grids(num_tokens, num_rows, config)
    parts = torch.empty((config["SPLIT"], *out.shape), dtype=torch.float32, device=device) if len(made) > 1 else out
    sums = x.scales.view(torch.int32) if x.sums is None else x.sums
    zeros = weight.codes.view(torch.int8) if weight.zeros is None else weight.zeros
    given, biased = (out, 0) if bias is None else (bias, num_rows)
    made[0].launch(
        blocks[0], x.codes, x.scales, sums, weight.codes, weight.scales, zeros, given, parts,
        num_tokens, num_rows, num_columns, biased,
    )  # fmt: skip
    if len(made) > 1:
        made[1].launch(blocks[1], parts, given, out, num_tokens, num_rows, biased)
    return out


def multiply_launches(
    policy: PrecisionPolicy, num_tokens: int, num_rows: int, config: Config, made: tuple[Variant, ...], *, fp8: bool
) -> tuple[KernelLaunch, ...]:
    """Return the launches of the variants `made`: the product, and the kernel that adds the parts of K if there
    is one.
    """
    unit = policy.fp8 if fp8 else policy.int8
    rows = config["BLOCK_N" if config["SWAP"] else "BLOCK_M"]
    instruction = "" if unit is None else unit.of_rows(rows, policy.capability).ptx
    blocks, adding = multiply_grids(num_tokens, num_rows, config)
    if len(made) == 1:
        return (KernelLaunch(made[0], blocks, instruction),)
    parts = 4 * config["SPLIT"] * num_tokens * num_rows
    return KernelLaunch(made[0], blocks, instruction, parts), KernelLaunch(made[1], adding, "", parts)


def tensor_configs(
    policy: PrecisionPolicy, num_tokens: int, num_rows: int, num_columns: int, group: int, *, fp8: bool
) -> tuple[Config, ...]:
    """Return the configs that a tuner may try.

    The first is a guess that is reasonable everywhere: at least 128 blocks, and parts of K of at least 512 columns.
    """
    unit = policy.fp8 if fp8 else policy.int8
    swap = unit is not None and unit.instruction != "mma.sync" and num_tokens < 64
    # Which is faster depends on the version of Triton, and a table may come from another version.
    either = not fp8 and policy.capability.instruction == "tcgen05" and num_tokens < 64
    swaps = (swap, not swap) if either else (swap,)
    block_m = min(128, max(16, triton.next_power_of_2(num_tokens)))
    few = block_m <= 64
    found = []
    for block_n in _widths(block_m, few, bool(group), fp8, policy.capability.instruction):
        blocks = cdiv(num_tokens, block_m) * cdiv(num_rows, block_n)
        parts = [split for split in (1, 2, 4, 8) if split == 1 or (few and num_columns >= 512 * split)]
        enough = next((split for split in parts if blocks * split >= 128), parts[-1])
        for block_k in (group,) if group else (128, 256) if few else (128, 64):
            for split in sorted(parts, key=lambda split: (split != enough, split)):
                stage = (block_m + block_n) * block_k
                max_stages = max(2, policy.max_stages(2 * stage)) if few else 4  # so that two blocks fit on an SM
                stages = min(policy.max_stages(stage), max_stages, 5)
                warps = 8 if block_m * block_n > (4096 if group else 8192) else 4
                sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
                found += [Config.of(warps, stages, **sizes, SWAP=each, SPLIT=split) for each in swaps]
    return tuple(found)


def _widths(block_m: int, few: bool, grouped: bool, fp8: bool, instruction: str) -> tuple[int, ...]:
    """Return the values of BLOCK_N to try for the 8-bit product on tensor cores.

    They are those for which no register was spilled when the kernel was compiled. Registers are taken by the scales of
    groups, with int8 one for each column; by two sums with fp8 on capability 9.0; and by int8 results of tcgen05.
    """
    if grouped and not fp8:
        return (64, 128) if block_m <= 32 else (64, 32)
    if few:
        return 64, 128
    spilling = instruction == ("wgmma" if fp8 else "tcgen05")
    return (128, 64) if grouped or spilling else (128, 64, 256)
