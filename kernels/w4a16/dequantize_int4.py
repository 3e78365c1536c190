"""Kernel that writes int4 weights dequantized in full, for torch's matrix product: worth it from about 40 tokens."""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device.dtypes import type_name
from ..launch.compiled_launch import cached, cdiv
from ..launch.variant import Config, Variant
from .packed_int4 import PackedInt4


@triton.jit
def _dequantize(words, scales, zeros, out, N, K, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Dequantize ROWS rows of one tile per program; a weight is computed in fp32 and rounded once."""
    NIBBLES: tl.constexpr = 8 * GROUP // 128  # nibbles of a word that belong to one group
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    tile = tl.program_id(1)
    lane = tl.arange(0, 16)[None, :]
    valid = (rows < N) & (lane < 16)
    packed = tl.load(words + (tile.to(tl.int64) * N + rows) * 16 + lane, valid, 0)
    for nibble in tl.static_range(8):
        which = (tile * (128 // GROUP) + nibble // NIBBLES).to(tl.int64) * N + rows + 0 * lane
        which = tl.max_contiguous(which, [1, 1])  # keeps Triton from loading along N, which would move data
        scale = tl.load(scales + which, valid, 0.0).to(tl.float32)
        zero = tl.load(zeros + which, valid, 0).to(tl.float32)
        code = (((packed >> (4 * nibble)) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        # Stores go in the order in which words are read.
        at = tl.max_contiguous(rows.to(tl.int64) * K + tile * 128 + 16 * nibble + lane, [1, 4])
        tl.store(out + at, (scale * (code - zero)).to(out.dtype.element_ty), valid)


@cached
def dequantize_variant(dtype: str, group_size: int, config: Config, *, scales: str) -> Variant:
    """Return the compiled variant that dequantizes to `dtype` (a Triton type name); config: ROWS per program."""
    types = {
        "words": "*i32", "scales": f"*{scales}", "zeros": "*i8", "out": f"*{dtype}", "N": "i32", "K": "i32"
    }  # fmt: skip
    aligned = ("words", "scales", "zeros", "out", "N", "K")
    return Variant("w4a16_dequantize", _dequantize, tuple(types.items()), (("GROUP", group_size),), config, aligned)


def dequantize_grid(num_rows: int, num_columns: int, config: Config) -> tuple[int, int]:
    return cdiv(num_rows, config["ROWS"]), num_columns // 128


def dequantize(weight: PackedInt4, dtype: torch.dtype, config: Config) -> torch.Tensor:
    """Return the dequantized weight [N, K], columns in the order in which `words` holds them; N must be a multiple of
    16.
    """
    num_rows, num_columns = weight.shape
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=weight.words.device)
    variant = dequantize_variant(type_name(out), weight.group_size, config, scales=type_name(weight.scales))
    grid = dequantize_grid(num_rows, num_columns, config)
    variant.launch(grid, weight.words, weight.scales, weight.zeros, out, num_rows, num_columns)
    return out


def matmul(x: torch.Tensor, weight: PackedInt4, dtype: torch.dtype, config: Config) -> torch.Tensor:
    """Return y [M, N] = x [M, K] @ w.T + bias, computed by torch in `dtype`, in the dtype of x."""
    dense = dequantize(weight, dtype, config)
    bias = None if weight.bias is None else weight.bias.to(dtype)
    return torch.nn.functional.linear(x.to(dtype), dense, bias).to(x.dtype)
