"""Paged batches whose cache is NaN wherever a kernel has no business."""

from __future__ import annotations

import torch

from motley.kernels.attention.attention_tile import AttentionSpec
from motley.kernels.attention.paged_batch import PagedBatch, random_batch


def guarded(heads: AttentionSpec, spans: list[tuple[int, int]], window: int | None = None, seed: int = 0) -> PagedBatch:
    """A random batch; NaN in every slot that no new token sees, and no block behind the end of a table.

    A padded row is the span (-1, 1): no context.
    """
    batch = random_batch(heads, spans, window=window, seed=seed)
    hidden = torch.ones_like(batch.cache.data[0, :, 0, :, 0], dtype=torch.bool)
    for sequence, (before, new) in enumerate(spans):
        block, offset = batch.cells(sequence)
        oldest = 0 if window is None else max(0, before - window + 1)
        hidden[block[oldest:], offset[oldest:]] = False
        batch.block_tables[sequence, -(-(before + new) // 16) :] = 2**30
    data, scales = batch.cache.data, batch.cache.scales
    if scales is None:
        data.masked_fill_(hidden[:, None, :, None], torch.nan)
    else:
        scales.masked_fill_(hidden[:, None], torch.nan)
    return batch
