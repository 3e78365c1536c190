"""Quantization of activations to 8 bits with a scale for each row: int8 (absmax / 127) or fp8 e4m3 (absmax / 448).

Each row is quantized by itself, so that an outlier never affects another row: with a scale for a whole batch one
request's result would depend on another's. Absolute values are compared as their bits, where infinities and NaN are
above all numbers: a row with one of them gets an infinite or NaN scale, which shows in its results.

A number is rounded to an integer by adding 1.5 * 2**23, whose unit in the last place is one: to nearest, ties to even.
A row whose absmax is below 2**-100 counts as zero; a zero row has scale 0.
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from ..device.dtypes import TORCH_DTYPES, type_name
from ..device.precision import PrecisionPolicy
from ..device.roofline import ElementwiseWork, OperationWork
from ..launch.compiled_launch import cached
from ..launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from ..launch.model_shapes import MODELS
from ..launch.variant import Config, Variant

Codes = Literal["int8", "fp8"]
LEVELS: dict[Codes, float] = {"int8": 127.0, "fp8": 448.0}
CODE_TYPE: dict[Codes, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SUMMED = (32, 128)  # group sizes whose codes can be summed
ONE_PASS = 32_768  # most columns of a row for one pass: 64 numbers for each of 512 threads


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Quantized activations x = scale of the row * code, in rows.

    codes   int8 or fp8 e4m3 [M, K]
    scales  fp32 [M]
    sums    int32 [K // group, M], sums of the codes of each group, for weights with zero points; else None
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor | None = None


@triton.jit
def magnitude_bits(value):
    """Return the bits of fp32 numbers as uint32 with the sign shifted out.

    They compare as the absolute values do, and NaN is above infinity. The sign is shifted out and not masked, since
    LLVM would turn a mask into an absolute value in the half precision in which the number was loaded.
    """
    return value.to(tl.uint32, bitcast=True) << 1


@triton.jit
def scale_of(bits, LEVELS: tl.constexpr):
    """Return the scale and its inverse, by which a number is multiplied to get its code, for rows with this largest
    magnitude.
    """
    absmax = (bits >> 1).to(tl.float32, bitcast=True)
    zero = absmax < 2.0**-100
    levels = tl.where(zero, 1.0, LEVELS)
    return tl.where(zero, 0.0, tl.div_rn(absmax, levels)), tl.where(
        zero, 0.0, tl.div_rn(levels, tl.where(zero, 1.0, absmax))
    )


@triton.jit
def round_to_int(value):
    """Round fp32 numbers with magnitudes below 2**22 to integers."""
    return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _to_fp8(value, PTX: tl.constexpr):
    """Convert to fp8 e4m3, to nearest, ties to even.

    Without PTX the rounding is computed here: Triton's interpreter loses a carry into the exponent.
    """
    if not PTX:
        bits = value.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        value = tl.where(tl.abs(value) < 2.0**-6, (value + 24576.0) - 24576.0, normal)
    return value.to(tl.float8e4nv)


@triton.jit(do_not_specialize=("M",))
def _quantize(
    x, codes, scales, sums, M, K,
    FP8: tl.constexpr, SUMS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, PTX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize one row per program; in one pass if WHOLE, i.e. if BLOCK holds all of it, else in two.

    With GROUP 0 the row is one group.
    """
    LEVELS: tl.constexpr = 448.0 if FP8 else 127.0
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x += row.to(tl.int64) * K
    codes += row.to(tl.int64) * K
    if WHOLE:
        value = tl.load(x + at, at < K, 0.0).to(tl.float32)
        scale, inverse = scale_of(tl.max(magnitude_bits(value), 0), LEVELS)
    else:
        top = tl.zeros((BLOCK,), tl.uint32)
        for start in range(0, K, BLOCK):
            top = tl.maximum(top, magnitude_bits(tl.load(x + start + at, start + at < K, 0.0).to(tl.float32)))
        scale, inverse = scale_of(tl.max(top, 0), LEVELS)
    tl.store(scales + row, scale)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BLOCK if WHOLE else K, BLOCK):
        if not WHOLE:
            value = tl.load(x + start + at, start + at < K, 0.0).to(tl.float32)
        if FP8:
            tl.store(codes + start + at, _to_fp8(value * inverse, PTX), start + at < K)
        else:
            code = round_to_int(value * inverse)
            tl.store(codes + start + at, code.to(tl.int8), start + at < K)
            if SUMS and GROUP > 0:
                of_groups = tl.sum(tl.reshape(code, (BLOCK // GROUP, GROUP)), 1)
                group = start // GROUP + tl.arange(0, BLOCK // GROUP)
                tl.store(sums + group * M + row, of_groups, group < K // GROUP)
            elif SUMS:
                total += code
    if SUMS and GROUP == 0:
        tl.store(sums + row, tl.sum(total, 0))


def rows_config(num_columns: int) -> Config:
    """Return a config that suits every GPU: up to 64 numbers per thread, in few warps for few columns."""
    block = min(ONE_PASS, triton.next_power_of_2(num_columns))
    return Config.of(max(1, min(16, block // 1024)), 1, BLOCK=block)


@cached
def rows_variant(
    dtype: str,
    num_columns: int,
    kind: Codes,
    config: Config,
    *,
    group: int = 0,
    with_sums: bool = False,
    ptx: bool = True,
) -> Variant:
    """Return the compiled variant of the kernel that quantizes activations row by row.

    dtype   Triton type name of x
    ptx     whether to use the hardware's conversion to fp8; False for Triton's interpreter
    group   columns per sum; 0: all
    config  BLOCK columns at a time
    """
    types = {
        "x": f"*{dtype}", "codes": "*i8" if kind == "int8" else "*fp8e4nv", "scales": "*fp32", "sums": "*i32",
        "M": "i32", "K": "i32",
    }  # fmt: skip
    whole = num_columns <= config["BLOCK"]
    constants = {"FP8": kind == "fp8", "SUMS": with_sums, "GROUP": group, "WHOLE": whole, "PTX": ptx}
    aligned = ("x", "codes", "scales", "sums", *(("K",) if num_columns % 16 == 0 else ()))
    name = f"quantize_rows_{kind}"
    return Variant(name, _quantize, tuple(types.items()), tuple(constants.items()), config, aligned)


def quantize_rows(
    x: torch.Tensor, kind: Codes, config: Config | None = None, *, group: int = 0, with_sums: bool = False
) -> QuantizedRows:
    """Quantize contiguous x [M, K] in fp16, bf16 or fp32, row by row.

    With `with_sums` the codes are also summed, over `group` columns each: 32, 128, or 0 for all.

    Raises ValueError for a group that does not divide K.
    """
    num_rows, num_columns = x.shape
    if group and num_columns % group:
        raise ValueError(f"group: {group} does not divide the {num_columns} columns")
    config = config or rows_config(num_columns)
    codes = torch.empty(x.shape, dtype=CODE_TYPE[kind], device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    groups = num_columns // (group or num_columns) if with_sums else 0
    sums = torch.empty((groups, num_rows), dtype=torch.int32, device=x.device) if with_sums else None
    variant = rows_variant(type_name(x), num_columns, kind, config, group=group, with_sums=with_sums, ptx=x.is_cuda)
    given = scales.view(torch.int32) if sums is None else sums
    variant.launch((num_rows,), x, codes, scales, given, num_rows, num_columns)
    return QuantizedRows(codes, scales, sums)


@dataclass(frozen=True, slots=True)
class QuantizeRowsOperation:
    """Operator that quantizes activations to 8 bits, row by row.

    Fields of a shape: m rows of k columns; `sums`, if present: columns per sum of codes, 0 for all.
    """

    kind: Codes
    exact: frozenset[str] = frozenset({"k"})

    @property
    def name(self) -> str:
        return f"quantize_rows_{self.kind}"

    def refusal(self, policy: PrecisionPolicy) -> str:
        unit = policy.int8 if self.kind == "int8" else policy.fp8
        return policy.reasons[self.kind] if unit is None else ""

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(ProblemShape.of(m=m, k=k) for k in _widths() for m in (1, 8, 64, 2048))

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Sample shapes: few columns, the most that one pass takes, and two passes.

        They include the sums that products with the policy's unit need, those of usual groups with every BLOCK that the
        models' layers use.
        """
        plain = tuple(ProblemShape.of(m=8, k=k) for k in (896, 25_600, 53_248))
        if self.kind == "fp8" or policy.int8 is None:
            return plain
        groups = (0,) if policy.int8.arithmetic == "dp4a" else (0, *SUMMED)
        sums = (ProblemShape.of(m=8, k=25_600, sums=group) for group in groups)
        blocks = {rows_config(k)["BLOCK"]: k for k in _widths()} if groups[-1] else {}
        usual = (ProblemShape.of(m=m, k=k, sums=groups[-1]) for k in blocks.values() for m in (8, 2048))
        return (*plain[:2], *sums, *usual, ProblemShape.of(m=8, k=53_248, sums=groups[-1]), plain[2])

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        small = (ProblemShape.of(m=3, k=896),)
        return (*small, ProblemShape.of(m=3, k=896, sums=0)) if self.kind == "int8" else small

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        first = rows_config(shape["k"])
        others = [Config.of(warps, 1, BLOCK=first["BLOCK"]) for warps in (1, 2, 4, 8, 16)]
        fitting = [one for one in others if first["BLOCK"] <= 64 * 32 * one.num_warps and one != first]
        return (first, *fitting)

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        with_sums, group = sum_groups(shape)
        variant = rows_variant(policy.storage, shape["k"], self.kind, config, group=group, with_sums=with_sums)
        return (KernelLaunch(variant, (shape["m"],)),)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        with_sums, group = sum_groups(shape)
        sums = shape["k"] // (group or shape["k"]) if with_sums else 0
        return ElementwiseWork(shape["m"] * (3 * shape["k"] + 4 + 4 * sums), 4 * shape["m"] * shape["k"])

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        dtype = TORCH_DTYPES[policy.storage]
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn((shape["m"], shape["k"]), generator=generator, device=device).to(dtype)
        with_sums, group = sum_groups(shape)

        def by_torch() -> torch.Tensor:
            scales = x.abs().amax(1, keepdim=True).float() / LEVELS[self.kind]
            codes = x.float() / scales
            return (codes.round() if self.kind == "int8" else codes).to(CODE_TYPE[self.kind])

        return KernelProblem(
            run=lambda config: quantize_rows(x, self.kind, config, group=group, with_sums=with_sums),
            error=lambda found: max(rounding_error(x, found, self.kind), sums_error(found, shape)),
            work=self.work(policy, shape),
            peers={"torch": by_torch},
        )


def _widths() -> tuple[int, ...]:
    """Numbers of input columns of all linear layers of the models that kernels are tuned for."""
    return tuple(sorted({k for model in MODELS for _, k in model.linears.values()}))


def sum_groups(shape: ProblemShape) -> tuple[bool, int]:
    """Return whether a shape asks for sums of codes, and the columns per sum; 0: all."""
    group = shape.get("sums", None)
    return group is not None, group or 0


def sums_error(found: QuantizedRows, shape: ProblemShape) -> float:
    """Return 0, or infinity unless the sums that the shape asks for equal the sums of the codes: they are exact."""
    with_sums, group = sum_groups(shape)
    if not with_sums:
        return 0.0
    num_rows, num_columns = found.codes.shape
    expected = found.codes.long().view(num_rows, -1, group or num_columns).sum(2).T
    return 0.0 if found.sums is not None and torch.equal(found.sums[:, :num_rows].long(), expected) else float("inf")


def rounding_error(x: torch.Tensor, found: QuantizedRows, kind: Codes) -> float:
    """Return the largest ratio of |scale * code - x| to half a step of the codes plus the rounding of the scales.

    e4m3 has four significant bits: half a step is 2**-4 of the number, and 2**-10 below 2**-6.
    """
    wide, scales = x.double(), found.scales.double()[:, None]
    half = 0.5 * scales if kind == "int8" else (wide.abs() * 2.0**-4).maximum(2.0**-10 * scales)
    bound = half + 4 * 2.0**-24 * wide.abs()
    difference = (found.codes.double() * scales - wide).abs()
    return float((difference / bound.clamp_min(2.0**-100)).max())
