"""Paged KV cache of a CPU, and attention over it in torch operators, for where the C kernel cannot be used.

A layer's cache is one tensor [num_blocks, 2, KH, D * 16]. For one block and head, K is stored as [D, 16] (so that a
query is multiplied with 16 keys at once, without a horizontal sum) and V as [16, D].

With int8, 16 scales in fp32 follow, one for each token: [num_blocks, 2, KH, D * 16 + 64] bytes. A vector's scale is its
absmax / 127, and its codes are rounded to the nearest integer, ties to even, as on a GPU (pointwise/rotary.py); the
scale of a vector that is not finite is NaN.
"""

from __future__ import annotations

import torch

from .. import reference
from ..batch import BLOCK_TOKENS, StepBatch
from .memory import lazy_pages

_TILE = 16  # query positions computed together
_STEP = 128  # keys processed at a time
_SCALES = 4 * BLOCK_TOKENS  # bytes of the scales of one block and head


def allocate_cache(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    size = head_dim * BLOCK_TOKENS + (_SCALES if dtype == torch.int8 else 0)
    return lazy_pages.lazy_zeros(num_blocks, 2, num_kv_heads, size, dtype=dtype)


def key_view(cache: torch.Tensor) -> torch.Tensor:
    """Return the keys as a view [num_blocks, KH, D, 16]; of an int8 cache their codes."""
    return _numbers(cache, 0).view(*cache[:, 0].shape[:2], -1, BLOCK_TOKENS)


def value_view(cache: torch.Tensor) -> torch.Tensor:
    """Return the values as a view [num_blocks, KH, 16, D]; of an int8 cache their codes."""
    return _numbers(cache, 1).view(*cache[:, 1].shape[:2], BLOCK_TOKENS, -1)


def scale_view(cache: torch.Tensor) -> torch.Tensor:
    """Return the scales of an int8 cache as a view fp32 [num_blocks, 2, KH, 16]."""
    return cache[..., -_SCALES:].view(torch.float32)


def write_cache(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: StepBatch) -> None:
    """Write k and v [T, KH, D] to their slots of the cache."""
    block, offset = batch.slots // BLOCK_TOKENS, batch.slots % BLOCK_TOKENS
    if cache.dtype == torch.int8:
        k, scale_view(cache)[block, 0, :, offset] = _rounded(k)
        v, scale_view(cache)[block, 1, :, offset] = _rounded(v)
    key_view(cache)[block, :, :, offset] = k
    value_view(cache)[block, :, offset] = v


def read_cache(cache: torch.Tensor, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v [num_tokens, KH, D] of the sequence whose block ids are `blocks`; fp32 from an int8 cache."""
    k, v = key_view(cache)[blocks], value_view(cache)[blocks]
    if cache.dtype == torch.int8:
        of = scale_view(cache)[blocks]
        k, v = k * of[:, 0, :, None], v * of[:, 1, :, :, None]
    return k.permute(0, 3, 1, 2).flatten(0, 1)[:num_tokens], v.permute(0, 2, 1, 3).flatten(0, 1)[:num_tokens]


def _numbers(cache: torch.Tensor, part: int) -> torch.Tensor:
    return cache[:, part, :, :-_SCALES] if cache.dtype == torch.int8 else cache[:, part]


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize vectors x [..., D] to int8 codes [..., D] and fp32 scales [...], for an int8 KV cache."""
    x = x.float()
    finite = x.isfinite().all(-1)
    scale = x.abs().amax(-1) / 127
    unit = torch.where(finite & (scale > 0), scale, torch.inf)
    codes = (x.nan_to_num(0.0, 0.0, 0.0) / unit[..., None]).round().to(torch.int8)
    return codes, torch.where(finite, scale, torch.nan)


def attention(q: torch.Tensor, cache: torch.Tensor, batch: StepBatch, scale: float, window: int | None) -> torch.Tensor:
    """Return attention [T, H, D] of q [T, H, D], computed sequence by sequence.

    The numerics are exact: a row's result depends on no other row.
    """
    out = torch.empty_like(q)
    for index, length in enumerate(batch.context_lens):
        start, end = batch.query_starts[index], batch.query_starts[index + 1]
        blocks = batch.block_tables[index, : -(-length // BLOCK_TOKENS)]
        k, v = (_padded(t.float(), _STEP) for t in read_cache(cache, blocks, length))
        out[start:end] = _sequence(q[start:end].float() * scale, k, v, length, window).to(q.dtype)
    return out


def _sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """Return the attention of the last len(q) positions of a sequence of `length` tokens, all in fp32.

    Queries are cut at absolute multiples of 16 and keys at multiples of 128, and missing rows are filled with zeros, so
    that every product has the same shape, and a position has the same place in it, whatever chunk it came in:

        positions    first ... length - 1     in tiles [16 i, 16 i + 16)
        keys         steps [128 j, 128 j + 128) from the oldest that is visible to the newest
    """
    first = length - len(q)
    lead = first % _TILE
    q = _padded(torch.cat((q.new_zeros(lead, *q.shape[1:]), q)), _TILE)
    tiles = [_tile(q[row : row + _TILE], k, v, first - lead + row, length, window) for row in range(0, len(q), _TILE)]
    return torch.cat(tiles)[lead : lead + length - first]


def _tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, length: int, window: int | None
) -> torch.Tensor:
    """Return attention [16, H, D] of q [16, H, D] at `position` and after, by a softmax carried from step to step."""
    kv_heads, dim = k.shape[1:]
    rows = q.view(_TILE, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)  # [KH, G * 16, D]
    top, mean = rows.new_full((*rows.shape[:2], 1), -1e30), torch.zeros_like(rows)
    total = torch.zeros_like(top)
    seen = reference.visible(torch.arange(position, position + _TILE), len(k), window)
    oldest = 0 if window is None else max(0, position - window + 1)
    for start in range(oldest // _STEP * _STEP, min(position + _TILE, length), _STEP):
        step = slice(start, start + _STEP)
        scores = rows @ k[step].permute(1, 2, 0)
        mask = seen[:, step].repeat(rows.shape[1] // _TILE, 1)
        scores = scores.masked_fill(~mask, float("-inf"))
        higher = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        shrink, weights = (top - higher).exp(), (scores - higher).exp()
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        mean = mean * shrink + weights @ v[step].transpose(0, 1)
        top = higher
    return (mean / total).view(kv_heads, -1, _TILE, dim).permute(2, 0, 1, 3).reshape(_TILE, -1, dim)


def _padded(t: torch.Tensor, multiple: int) -> torch.Tensor:
    """Append rows of zeros to t [n, ...] until the number of rows is a multiple of `multiple`."""
    return torch.cat((t, t.new_zeros(-len(t) % multiple, *t.shape[1:])))
