"""Triton kernels that only move memory: a copy by the SMs, and a sum that writes next to nothing. For measuring alone.

`Tensor.copy_` may be done by a card's copy engines, and no kernel of ours is; what only reads can be faster than any
copy. So these two are what kernels of ours can reach.
"""

# What is inside a kernel is Triton's language, of which type checkers know nothing.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.variant import Config, Variant

__all__ = ["CHUNK_BYTES", "STREAM_VARIANTS", "partial_sums", "stream_copy", "stream_read"]

_BLOCK, _TURNS = 1024, 8  # words of four bytes that a program moves at a time, and how often
CHUNK_BYTES = 4 * _BLOCK * _TURNS  # what is moved must be a multiple of it: no load has a mask


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
    """Both int32 and as long, a multiple of `CHUNK_BYTES`, aligned to 16 bytes as torch allocates them."""
    _COPY.launch((source.nbytes // CHUNK_BYTES,), source, target)


def stream_read(source: torch.Tensor, sums: torch.Tensor) -> None:
    """The sum of each chunk of int32s, into as many int32s as `partial_sums` gave."""
    _READ.launch((source.nbytes // CHUNK_BYTES,), source, sums)


def partial_sums(source: torch.Tensor) -> torch.Tensor:
    """Room for what `stream_read` writes of it."""
    return torch.empty(source.nbytes // CHUNK_BYTES, dtype=torch.int32, device=source.device)
