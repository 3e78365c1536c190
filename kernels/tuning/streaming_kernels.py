"""Triton kernels that only move memory, for measurements: a copy by the SMs, and a sum that writes almost nothing.

`Tensor.copy_` may use a card's copy engines, which none of our kernels does; and pure reads can be faster than any
copy. So these two show what our kernels can reach.
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.variant import Config, Variant

_BLOCK, _TURNS = 1024, 8  # four-byte words that a program moves at a time, and number of times
CHUNK_BYTES = 4 * _BLOCK * _TURNS  # the moved bytes must be a multiple of this, since no load has a mask


@triton.jit
def _copy(source, target, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * TURNS) + tl.arange(0, BLOCK)
    for turn in tl.static_range(TURNS):
        tl.store(target + start + turn * BLOCK, tl.load(source + start + turn * BLOCK))


@triton.jit
def _read(source, sums, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * TURNS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for turn in tl.static_range(TURNS):
        total += tl.load(source + start + turn * BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


_CONFIG = Config.of(4, 1, BLOCK=_BLOCK, TURNS=_TURNS)
_COPY = Variant(
    "stream_copy", _copy, (("source", "*i32"), ("target", "*i32")), (), _CONFIG, ("source", "target")
)  # fmt: skip
_READ = Variant("stream_read", _read, (("source", "*i32"), ("sums", "*i32")), (), _CONFIG, ("source", "sums"))
STREAM_VARIANTS = (_COPY, _READ)


def stream_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy int32 `source` to `target`.

    Both have the same length, a multiple of `CHUNK_BYTES`, and are aligned to 16 bytes as torch allocates them.
    """
    _COPY.launch((source.nbytes // CHUNK_BYTES,), source, target)


def stream_read(source: torch.Tensor, sums: torch.Tensor) -> None:
    """Store the sum of each chunk of int32 `source` to `sums`, a tensor from `partial_sums`."""
    _READ.launch((source.nbytes // CHUNK_BYTES,), source, sums)


def partial_sums(source: torch.Tensor) -> torch.Tensor:
    """Allocate the tensor of sums that `stream_read` of a source writes."""
    return torch.empty(source.nbytes // CHUNK_BYTES, dtype=torch.int32, device=source.device)
