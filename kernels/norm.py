"""RMSNorm, and the sum of a residual with it: long rows, one program each, and short ones, several to a program.

A long row is loaded once and stays in registers, in pieces of BLOCK columns, so that only its last piece has lanes
without work. All arithmetic is fp32 whatever the storage. The sum of x and residual is rounded to their dtype before
it is normalised, as the reference has it: what is normalised is what the next layer adds to.

A sum beyond 65504 in fp16 becomes infinite and its row not a number, which reaches the logits, where sampling.py
sees it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
# ruff: noqa: RUF005  tuples grow by addition there

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import reference
from .model_shapes import MODELS
from .operation import Launch, Problem, Shape
from .pointwise import ROUNDING, TOKENS, Pointwise, sizes, smallest, storage, worst
from .precision import PrecisionPolicy
from .roofline import Elementwise, Op
from .variant import Config, Variant, type_name

__all__ = ["OPERATIONS", "add_rms_norm", "norm_variant", "rms_norm", "short_norm_variant"]


@triton.jit
def _norm(
    x,
    residual,
    weight,
    out,
    total,
    outer_stride,
    eps,
    unit,
    N: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a row. With ADD, `total` may be `residual`: a thread writes what it alone has read.

    unit  1.0, which the compiler must not know: the fp32 sum of two halves that is then rounded to a half it would
          else form in halves, which is the same number, and on 6.1 takes 64 times as long
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    pieces = ()
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        inside = start + at < N
        piece = tl.load(x + row * outer_stride + start + at, inside, 0.0).to(tl.float32)
        if ADD:
            beside = tl.load(residual + row * N + start + at, inside, 0.0).to(tl.float32)
            rounded = tl.fma(piece, unit, beside).to(total.dtype.element_ty)
            tl.store(total + row * N + start + at, rounded, inside)
            piece = rounded.to(tl.float32)
        squares += piece * piece
        pieces = pieces + (piece,)
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    for index in tl.static_range(0, (N + BLOCK - 1) // BLOCK):
        column = index * BLOCK + at
        gain = tl.load(weight + column, column < N, 0.0).to(tl.float32)
        normed = pieces[index] * inverse * gain
        tl.store(out + row * N + column, normed.to(out.dtype.element_ty), column < N)


@triton.jit
def _short_norm(
    x,
    weight,
    out,
    num_rows,
    INNER,
    outer_stride,
    inner_stride,
    eps,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows a program. Row r of x is at (r // INNER, r % INNER), as the heads of a token lie in a wider row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < N)
    where = (row // INNER).to(tl.int64) * outer_stride + (row % INNER) * inner_stride
    value = tl.load(x + where + column, inside, 0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / N + eps)
    # for every row anew, where a thread has its columns: sharing it would go through shared memory
    gain = tl.load(weight + row * 0 + column, inside, 0.0).to(tl.float32)
    normed = value * inverse[:, None] * gain
    tl.store(out + row.to(tl.int64) * N + column, normed.to(out.dtype.element_ty), inside)


def norm_variant(dtype: str, weight: str, num_columns: int, config: Config, *, add: bool) -> Variant:
    """`dtype`, `weight`: of x and the results, and of the weight, in Triton's words.

    config  BLOCK columns at a time, a power of two
    """
    types = {
        "x": f"*{dtype}", "residual": f"*{dtype}", "weight": f"*{weight}", "out": f"*{dtype}", "total": f"*{dtype}",
        "outer_stride": "i32", "eps": "fp32", "unit": "fp32",
    }  # fmt: skip
    name = "add_rms_norm" if add else "rms_norm"
    constants = (("N", num_columns), ("ADD", add))
    return Variant(name, _norm, tuple(types.items()), constants, config, _aligned(types, num_columns, "outer_stride"))


def short_norm_variant(dtype: str, weight: str, num_columns: int, config: Config) -> Variant:
    """As `norm_variant`. config: ROWS of x for a program."""
    types = {
        "x": f"*{dtype}", "weight": f"*{weight}", "out": f"*{dtype}", "num_rows": "i32", "INNER": "i32",
        "outer_stride": "i32", "inner_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    constants = (("N", num_columns), ("BLOCK", triton.next_power_of_2(num_columns)))
    aligned = _aligned(types, num_columns, "outer_stride", "inner_stride")
    return Variant("short_rms_norm", _short_norm, tuple(types.items()), constants, config, aligned)


def _aligned(types: dict[str, str], num_columns: int, *strides: str) -> tuple[str, ...]:
    """Strides are whole rows of such columns."""
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    return pointers + (strides if num_columns % 16 == 0 else ())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, config: Config) -> torch.Tensor:
    """x [..., N] normalised over its last dimension, times weight [N]; contiguous, in the dtype of x.

    x may be a view of up to three dimensions whose rows are whole, such as the heads of a fused projection. A config
    with ROWS is for short rows, one with BLOCK for long ones; either is right for any.
    """
    num_columns = x.shape[-1]
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous().view(-1, num_columns)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = out.numel() // num_columns
    if not num_rows:
        return out
    inner = x.shape[1] if x.dim() == 3 else 1
    outer_stride = x.stride(0) if x.dim() > 1 else num_columns
    if "ROWS" in dict(config.constants):
        variant = short_norm_variant(type_name(x), type_name(weight), num_columns, config)
        inner_stride = x.stride(1) if x.dim() == 3 else num_columns
        grid = (triton.cdiv(num_rows, config["ROWS"]),)
        variant.launch(grid, x, weight, out, num_rows, inner, outer_stride, inner_stride, eps)
        return out
    if x.dim() == 3:
        x, outer_stride = x.contiguous(), num_columns
    variant = norm_variant(type_name(x), type_name(weight), num_columns, config, add=False)
    variant.launch((num_rows,), x, x, weight, out, x, outer_stride, eps, 1.0)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    config: Config,
    *,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual) of [T, N]; the sum is a new tensor, or the residual with `in_place`."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), residual if in_place else torch.empty_like(x)
    num_columns = x.shape[-1]
    if x.numel():
        variant = norm_variant(type_name(x), type_name(weight), num_columns, config, add=True)
        grid = (x.numel() // num_columns,)
        variant.launch(grid, x, residual, weight, out, total, num_columns, eps, 1.0)
    return out, total


def _bound(expected: torch.Tensor, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
    """The last rounding; of the sum of squares half, as roots are taken; rsqrt.approx, division and two products.

    A square goes through no more additions than a warp's lane has columns, and those between lanes and pieces.
    """
    depth = num_columns / 32 + 16
    return expected.abs() * (ROUNDING[dtype] + (depth / 2 + 8) * 2.0**-24) + smallest(dtype)


def norm_error(x: torch.Tensor, weight: torch.Tensor, eps: float, found: torch.Tensor) -> float:
    """Of `found` to fp64, over what rounding explains. x: exactly what was normalised."""
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
    return worst(found, expected, _bound(expected, found.dtype, x.shape[-1]))


def add_norm_error(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    found: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """Likewise: of the sum, and of the norm of that very sum."""
    normed, total = found
    expected = x.double() + residual.double()
    of_sum = worst(total, expected, expected.abs() * ROUNDING[x.dtype] + smallest(x.dtype))
    return max(of_sum, norm_error(total, weight, eps, normed))


@dataclass(frozen=True, slots=True)
class Norm(Pointwise):
    """`add`: with the residual's sum. Rows of a hidden state."""

    name: str
    add: bool

    def shapes(self, policy: PrecisionPolicy) -> tuple[Shape, ...]:
        return tuple(Shape.of(n=model.hidden, t=tokens) for model in MODELS for tokens in TOKENS)

    def samples(self, policy: PrecisionPolicy) -> tuple[Shape, ...]:
        return tuple(Shape.of(n=model.hidden, t=1) for model in MODELS)

    def configs(self, policy: PrecisionPolicy, shape: Shape) -> tuple[Config, ...]:
        cuts = [(1024, 4), (512, 2), (2048, 8), (2048, 4), (4096, 8)]
        return tuple(Config.of(warps, BLOCK=block) for block, warps in cuts if block == 1024 or block <= shape["n"])

    def launches(self, policy: PrecisionPolicy, shape: Shape, config: Config) -> tuple[Launch, ...]:
        word = storage(policy)[1]
        return (Launch(norm_variant(word, word, shape["n"], config, add=self.add), (shape["t"],)),)

    def work(self, policy: PrecisionPolicy, shape: Shape) -> Op:
        columns, tokens = sizes(shape, "n", "t")
        moved = columns * (tokens * (4 if self.add else 2) + 1)
        return Elementwise(moved * storage(policy)[0].itemsize, tokens * columns * (5 if self.add else 4))

    def problem(self, policy: PrecisionPolicy, shape: Shape, device: torch.device, seed: int = 0) -> Problem:
        columns, tokens = sizes(shape, "n", "t")
        x, residual, weight = _inputs(policy, (tokens, columns), device, seed)
        if self.add:
            return Problem(
                lambda config: add_rms_norm(x, residual, weight, 1e-6, config),
                lambda found: add_norm_error(x, residual, weight, 1e-6, found),
                self.work(policy, shape),
                {"torch": lambda: reference.add_rms_norm(x, residual, weight, 1e-6)},
            )
        return Problem(
            lambda config: rms_norm(x, weight, 1e-6, config),
            lambda found: norm_error(x, weight, 1e-6, found),
            self.work(policy, shape),
            {"torch": lambda: torch.nn.functional.rms_norm(x, (columns,), weight, 1e-6)},
        )


@dataclass(frozen=True, slots=True)
class HeadNorm(Pointwise):
    """Of every query head where it lies in the fused projection (Qwen3)."""

    name: str = "head_rms_norm"
    exact: frozenset[str] = frozenset({"d"})

    def shapes(self, policy: PrecisionPolicy) -> tuple[Shape, ...]:
        return tuple(Shape.of(d=128, h=64, t=tokens) for tokens in TOKENS)

    def samples(self, policy: PrecisionPolicy) -> tuple[Shape, ...]:
        return (Shape.of(d=128, h=64, t=1),)

    def configs(self, policy: PrecisionPolicy, shape: Shape) -> tuple[Config, ...]:
        return tuple(Config.of(warps, ROWS=rows) for rows, warps in [(8, 4), (16, 4), (32, 4), (4, 1), (16, 8)])

    def launches(self, policy: PrecisionPolicy, shape: Shape, config: Config) -> tuple[Launch, ...]:
        word = storage(policy)[1]
        grid = (triton.cdiv(shape["t"] * shape["h"], config["ROWS"]),)
        return (Launch(short_norm_variant(word, word, shape["d"], config), grid),)

    def work(self, policy: PrecisionPolicy, shape: Shape) -> Op:
        dim, heads, tokens = sizes(shape, "d", "h", "t")
        return Elementwise(dim * (2 * tokens * heads + 1) * storage(policy)[0].itemsize, 4 * tokens * heads * dim)

    def problem(self, policy: PrecisionPolicy, shape: Shape, device: torch.device, seed: int = 0) -> Problem:
        dim, heads, tokens = sizes(shape, "d", "h", "t")
        x, _, weight = _inputs(policy, (tokens, heads + 16, dim), device, seed)
        x = x[:, :heads]
        return Problem(
            lambda config: rms_norm(x, weight, 1e-6, config),
            lambda found: norm_error(x, weight, 1e-6, found),
            self.work(policy, shape),
            {"torch": lambda: torch.nn.functional.rms_norm(x, (dim,), weight, 1e-6)},
        )


def _inputs(
    policy: PrecisionPolicy, shape: tuple[int, ...], device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual and weight."""
    source, dtype = torch.Generator(device).manual_seed(seed), storage(policy)[0]
    x, residual = (torch.randn(shape, generator=source, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], generator=source, device=device) + 0.5
    return x, residual, weight.to(dtype)


RMS_NORM = Norm("rms_norm", add=False)
ADD_RMS_NORM = Norm("add_rms_norm", add=True)
HEAD_NORM = HeadNorm()
OPERATIONS = (RMS_NORM, ADD_RMS_NORM, HEAD_NORM)
