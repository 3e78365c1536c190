"""RMSNorm kernels, with and without adding a residual: for long rows, one per program, and for short rows, several.

A long row is loaded once and stays in registers, in pieces of BLOCK columns, so that only its last piece has idle
lanes. All arithmetic is fp32 whatever the storage dtype. The sum of x and residual is rounded to their dtype before it
is normalised, as in the reference: the normalised values are the ones that the next layer adds to.

A sum beyond 65504 becomes infinite in fp16, and its row NaN, which reaches the logits, where sampling/sample.py detects
it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
# ruff: noqa: RUF005  Triton extends tuples by addition

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device.dtypes import type_name
from ..launch.compiled_launch import cached, cdiv
from ..launch.variant import Config, Variant

MAX_COLUMNS = 32_768  # longest row: 64 numbers for each of 512 threads


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
    """Normalise one row per program, after adding the residual if ADD.

    `total` may be the same tensor as `residual`: a thread writes only elements that it alone has read.

    unit  1.0, which the compiler must not know to be constant: an fp32 sum of two half-precision numbers that is then
          rounded to half precision would be computed in half precision, with the same result, which on capability 6.1
          takes 64 times as long
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


@triton.jit(do_not_specialize=("INNER", "num_rows"))
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
    """Normalise ROWS rows per program.

    Row r of x lies at (r // INNER, r % INNER), in the way the heads of a token lie in a wider row.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < N)
    where = (row // INNER).to(tl.int64) * outer_stride + (row % INNER) * inner_stride
    value = tl.load(x + where + column, inside, 0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / N + eps)
    # Loaded again for every row, by the thread that has the column: sharing it would need shared memory.
    gain = tl.load(weight + row * 0 + column, inside, 0.0).to(tl.float32)
    normed = value * inverse[:, None] * gain
    tl.store(out + row.to(tl.int64) * N + column, normed.to(out.dtype.element_ty), inside)


@cached
def norm_variant(dtype: str, weight: str, num_columns: int, config: Config, *, add: bool) -> Variant:
    """Return the compiled variant of the kernel for long rows.

    dtype, weight  Triton type names of x and the results, and of the weight
    config         BLOCK columns at a time, a power of two
    """
    types = {
        "x": f"*{dtype}", "residual": f"*{dtype}", "weight": f"*{weight}", "out": f"*{dtype}", "total": f"*{dtype}",
        "outer_stride": "i32", "eps": "fp32", "unit": "fp32",
    }  # fmt: skip
    name = "add_rms_norm" if add else "rms_norm"
    constants = (("N", num_columns), ("ADD", add))
    return Variant(name, _norm, tuple(types.items()), constants, config, _aligned(types, num_columns, "outer_stride"))


@cached
def short_norm_variant(dtype: str, weight: str, num_columns: int, config: Config) -> Variant:
    """Return the compiled variant of the kernel for short rows.

    dtype, weight  Triton type names of x and the result, and of the weight
    config         ROWS of x per program
    """
    types = {
        "x": f"*{dtype}", "weight": f"*{weight}", "out": f"*{dtype}", "num_rows": "i32", "INNER": "i32",
        "outer_stride": "i32", "inner_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    constants = (("N", num_columns), ("BLOCK", triton.next_power_of_2(num_columns)))
    aligned = _aligned(types, num_columns, "outer_stride", "inner_stride")
    return Variant("short_rms_norm", _short_norm, tuple(types.items()), constants, config, aligned)


def _checked_columns(num_columns: int) -> int:
    """Return the number of columns. Raises ValueError if such a row would not fit into the registers of a block."""
    if num_columns > MAX_COLUMNS:
        raise ValueError(f"x: rows of {num_columns} columns are not accepted; expected {MAX_COLUMNS} at most")
    return num_columns


def _aligned(types: dict[str, str], num_columns: int, *strides: str) -> tuple[str, ...]:
    """Return the arguments that are multiples of 16; `strides` are multiples of `num_columns`."""
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    return pointers + (strides if num_columns % 16 == 0 else ())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, config: Config) -> torch.Tensor:
    """Return x [..., N] normalised over its last dimension, times weight [N]; contiguous, in the dtype of x.

    x may be a view of up to three dimensions whose rows are contiguous, such as the heads of a fused projection. A
    config with ROWS is meant for short rows, one with BLOCK for long ones; both give correct results for any row.
    """
    num_columns = _checked_columns(x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous().view(-1, num_columns)
    num_rows = out.numel() // num_columns
    if not num_rows:
        return out
    inner = x.shape[1] if x.dim() == 3 else 1
    outer_stride = x.stride(0) if x.dim() > 1 else num_columns
    if "ROWS" in dict(config.constants):
        variant = short_norm_variant(type_name(x), type_name(weight), num_columns, config)
        inner_stride = x.stride(1) if x.dim() == 3 else num_columns
        grid = (cdiv(num_rows, config["ROWS"]),)
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
    """Return rms_norm(x + residual) and x + residual of [T, N].

    The sum is a new tensor, or with `in_place` it overwrites the residual.
    """
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), residual if in_place else torch.empty_like(x)
    num_columns = _checked_columns(x.shape[-1])
    if x.numel():
        variant = norm_variant(type_name(x), type_name(weight), num_columns, config, add=True)
        grid = (x.numel() // num_columns,)
        variant.launch(grid, x, residual, weight, out, total, num_columns, eps, 1.0)
    return out, total
