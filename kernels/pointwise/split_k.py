"""Kernel that adds the partial sums of a product whose K was split, in a fixed order.

So no result depends on the order in which programs finish.
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from ..launch.compiled_launch import cached, cdiv
from ..launch.variant import Config, Variant

_CONFIG = Config.of(4, 1, BLOCK=1024)


@triton.jit(do_not_specialize=("M", "BIASED"))
def _add_parts(parts, bias, out, M, N, BIASED, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Store out [M, N] = the sum of parts fp32 [SPLITS, M, N], in order, plus bias [N].

    BIASED is N, or 0 without a bias.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = M.to(tl.int64) * N
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + part * size + at, at < size, 0.0)
    column = at % N
    total += tl.load(bias + column, (at < size) & (column < BIASED), 0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), at < size)


@cached
def split_k_variant(name: str, dtype: str, splits: int, *, bias: str | None) -> Variant:
    """Return the compiled variant of the kernel that adds parts.

    dtype, bias  Triton type names of the result and of the bias; without a bias the same kernel is used
    """
    types = {
        "parts": "*fp32", "bias": f"*{bias or dtype}", "out": f"*{dtype}", "M": "i32", "N": "i32", "BIASED": "i32"
    }  # fmt: skip
    constants = {"SPLITS": splits}
    aligned = ("parts", "bias", "out", "N")
    return Variant(name, _add_parts, tuple(types.items()), tuple(constants.items()), _CONFIG, aligned)


def split_k_grid(num_tokens: int, num_rows: int) -> tuple[int]:
    return (cdiv(num_tokens * num_rows, _CONFIG["BLOCK"]),)
