"""Quantization of activations to int8 in the panels that dp4a_gemm.py reads, with a scale for each row.

A word holds four columns, and the words of neighbouring rows are side by side. The kernel computes the same as
quantize_rows.py, in two passes (the second mostly from L2) over a block of rows at a time, so that the rows of a block,
which are side by side in a panel, are stored together.
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..device.dtypes import TORCH_DTYPES, type_name
from ..device.precision import PrecisionPolicy
from ..device.roofline import OperationWork
from ..launch.compiled_launch import cached, cdiv
from ..launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from ..launch.variant import Config, Variant
from .quantize_rows import (
    SUMMED,
    QuantizedRows,
    QuantizeRowsOperation,
    magnitude_bits,
    round_to_int,
    rounding_error,
    scale_of,
    sum_groups,
    sums_error,
)

PANEL = 128  # rows per panel
PANELS_CONFIG = Config.of(4, 1, ROWS=32, BLOCK=128)


@dataclass(frozen=True, slots=True)
class QuantizedPanels:
    """Quantized activations x = scale of the row * code, in panels.

    words   int32 [panels, K / 4, 128]: byte i of [p, j, r] is column 4 * j + i of row 128 * p + r
    scales  fp32 [M]
    sums    int32 [K // group, 128 * panels], sums of the codes of each group, for weights with zero points; else None
    """

    words: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor | None = None


@triton.jit(do_not_specialize=("M",))
def _quantize_panels(
    x, words, scales, sums, M, PADDED_M, K,
    SUMS: tl.constexpr, GROUP: tl.constexpr, PANEL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows per program, BLOCK columns at a time; with GROUP 0 a row is one group."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    x += row.to(tl.int64)[:, None] * K + column[None, :]
    words += (first // PANEL).to(tl.int64) * (K // 4) * PANEL + first % PANEL + tl.arange(0, ROWS)[None, :]
    top = tl.zeros((ROWS, BLOCK), tl.uint32)
    for start in range(0, K, BLOCK):
        value = tl.load(x + start, (row < M)[:, None] & (start + column < K)[None, :], 0.0)
        top = tl.maximum(top, magnitude_bits(value.to(tl.float32)))
    scale, inverse = scale_of(tl.max(top, 1), 127.0)
    tl.store(scales + row, scale, row < M)
    total = tl.zeros((ROWS,), tl.int32)
    for start in range(0, K, BLOCK):
        value = tl.load(x + start, (row < M)[:, None] & (start + column < K)[None, :], 0.0)
        code = round_to_int(value.to(tl.float32) * inverse[:, None])
        byte = tl.reshape(code & 255, (ROWS, BLOCK // 4, 4)) << (8 * tl.arange(0, 4))[None, None, :]
        word = start // 4 + tl.arange(0, BLOCK // 4)
        tl.store(
            words + word[:, None] * PANEL, tl.trans(tl.sum(byte, 2)), (word < K // 4)[:, None] & (row >= 0)[None, :]
        )
        if SUMS and GROUP > 0:
            group = start // GROUP + tl.arange(0, BLOCK // GROUP)
            at = group[None, :] * PADDED_M + row[:, None]
            of_groups = tl.sum(tl.reshape(code, (ROWS, BLOCK // GROUP, GROUP)), 2)
            tl.store(sums + at, of_groups, (group < K // GROUP)[None, :] & (row >= 0)[:, None])
        elif SUMS:
            total += tl.sum(code, 1)
    if SUMS and GROUP == 0:
        tl.store(sums + row, total)


@cached
def panels_variant(dtype: str, config: Config, *, group: int = 0, with_sums: bool = False) -> Variant:
    """Return the compiled variant of the kernel that quantizes activations to panels.

    dtype   Triton type name of x
    config  ROWS of a panel, BLOCK columns, at least as many as a group has
    """
    types = {
        "x": f"*{dtype}", "words": "*i32", "scales": "*fp32", "sums": "*i32",
        "M": "i32", "PADDED_M": "i32", "K": "i32",
    }  # fmt: skip
    constants = {"SUMS": with_sums, "GROUP": group, "PANEL": PANEL}
    aligned = ("x", "words", "scales", "sums", "PADDED_M", "K")
    return Variant("quantize_panels", _quantize_panels, tuple(types.items()), tuple(constants.items()), config, aligned)


def panels_grid(num_rows: int, config: Config) -> tuple[int, ...]:
    """Return the launch grid, which covers every panel in full, since its last rows become zeros."""
    return (cdiv(num_rows, PANEL) * PANEL // config["ROWS"],)


def quantize_panels(
    x: torch.Tensor, config: Config = PANELS_CONFIG, *, group: int = 0, with_sums: bool = False
) -> QuantizedPanels:
    """Quantize contiguous x [M, K] in fp16, bf16 or fp32 to panels; K must be a multiple of 4.

    With `with_sums` the codes are also summed, over `group` columns each: 32, 128, or 0 for all.

    Raises ValueError for a K or a group that does not fit.
    """
    num_rows, num_columns = x.shape
    if num_columns % (group or 4):
        raise ValueError(f"K: {num_columns} is not a multiple of {group or 4}")
    padded = cdiv(num_rows, PANEL) * PANEL
    words = torch.empty((padded // PANEL, num_columns // 4, PANEL), dtype=torch.int32, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    groups = num_columns // (group or num_columns) if with_sums else 0
    sums = torch.empty((groups, padded), dtype=torch.int32, device=x.device) if with_sums else None
    variant = panels_variant(type_name(x), config, group=group, with_sums=with_sums)
    variant.launch(
        panels_grid(num_rows, config), x, words, scales, words if sums is None else sums, num_rows, padded, num_columns
    )
    return QuantizedPanels(words, scales, sums)


def unpack_panels(x: QuantizedPanels) -> QuantizedRows:
    """Convert int8 activations from panels, as dp4a reads them, back to rows."""
    panels, words, rows = x.words.shape
    codes = x.words.transpose(1, 2).reshape(panels * rows, words).contiguous().view(torch.int8)
    return QuantizedRows(codes[: x.scales.shape[0]], x.scales, x.sums)


@dataclass(frozen=True, slots=True)
class QuantizePanelsOperation:
    """Operator that quantizes activations to panels, for policies that use dp4a.

    Its shapes have the same fields as those of `QuantizeRowsOperation`.
    """

    name: str = "quantize_panels"
    exact: frozenset[str] = frozenset()

    def refusal(self, policy: PrecisionPolicy) -> str:
        if policy.int8 is None:
            return policy.reasons["int8"]
        return "" if policy.int8.arithmetic == "dp4a" else f"{policy.int8.arithmetic} reads rows, not panels"

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(shape for shape in QuantizeRowsOperation("int8").shapes(policy) if shape["m"] > 8)

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return (
            ProblemShape.of(m=2048, k=4096),
            *(ProblemShape.of(m=2048, k=4096, sums=group) for group in (0, *SUMMED)),
        )

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return (ProblemShape.of(m=20, k=256), ProblemShape.of(m=20, k=256, sums=128))

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        others = tuple(
            Config.of(warps, 1, ROWS=rows, BLOCK=128) for rows, warps in ((16, 4), (16, 2), (32, 8), (64, 8))
        )
        return (PANELS_CONFIG, *others)

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        with_sums, group = sum_groups(shape)
        variant = panels_variant(policy.storage, config, group=group, with_sums=with_sums)
        return (KernelLaunch(variant, panels_grid(shape["m"], config)),)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        return QuantizeRowsOperation("int8").work(policy, shape)

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        dtype = TORCH_DTYPES[policy.storage]
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn((shape["m"], shape["k"]), generator=generator, device=device).to(dtype)
        with_sums, group = sum_groups(shape)

        def error(found: QuantizedPanels) -> float:
            rows = unpack_panels(found)
            return max(rounding_error(x, rows, "int8"), sums_error(rows, shape))

        def by_torch() -> torch.Tensor:
            codes = (x.float() / (x.abs().amax(1, keepdim=True).float() / 127)).round().to(torch.int8)
            missing = -codes.shape[0] % PANEL
            words = torch.nn.functional.pad(codes, (0, 0, 0, missing)).view(torch.int32)
            return words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()

        return KernelProblem(
            run=lambda config: quantize_panels(x, config, group=group, with_sums=with_sums),
            error=error,
            work=self.work(policy, shape),
            peers={"torch": by_torch},
        )
