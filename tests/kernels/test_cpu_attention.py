"""Paged attention against the plain reference."""

import pytest
import torch

from motley.kernels import ops, reference
from motley.kernels.batch import BLOCK_TOKENS, StepBatch


def make_batch(spans: list[tuple[int, int]], generator: torch.Generator) -> StepBatch:
    """One sequence for each (computed before, new) span, decodes first, over scattered blocks."""
    lengths = [before + new for before, new in spans]
    widths = [-(-length // BLOCK_TOKENS) for length in lengths]
    free = torch.randperm(sum(widths) + 3, generator=generator)
    tables = torch.zeros(len(spans), max(widths), dtype=torch.int32)
    positions, slots, starts, taken = [], [], [0], 0
    for row, (before, new) in enumerate(spans):
        tables[row, : widths[row]] = free[taken : taken + widths[row]].int()
        taken += widths[row]
        where = torch.arange(before, before + new)
        positions.append(where)
        slots.append(tables[row, where // BLOCK_TOKENS].long() * BLOCK_TOKENS + where % BLOCK_TOKENS)
        starts.append(starts[-1] + new)
    return StepBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_starts=tuple(starts),
        context_lens=tuple(lengths),
        block_tables=tables,
        logit_rows=torch.arange(starts[-1]),
        num_decodes=sum(1 for _, new in spans if new == 1),
    )


SPANS = [[(0, 1)], [(16, 1), (3, 1), (90, 1)], [(0, 37)], [(40, 1), (7, 1), (20, 33), (0, 5)]]


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("heads", [(4, 4, 8), (14, 2, 64), (6, 3, 40)])
@pytest.mark.parametrize("window", [None, 19])
def test_matches_reference(spans, heads, window):
    num_heads, num_kv_heads, head_dim = heads
    rng = torch.Generator().manual_seed(0)
    device_ops = ops.for_device("cpu")
    batch = make_batch(spans, rng)
    (cache,) = device_ops.allocate_kv(1, int(batch.block_tables.max()) + 4, num_kv_heads, head_dim)
    scale = head_dim**-0.5
    contexts = [torch.randn(2, n, num_kv_heads, head_dim, generator=rng) for n in batch.context_lens]
    history = make_history(batch)
    if history.num_tokens:
        old = torch.cat([c[:, :before] for c, (before, _) in zip(contexts, spans, strict=True)], dim=1)
        device_ops.write_kv(old[0], old[1], cache, history)
    new = torch.cat([c[:, before:] for c, (before, _) in zip(contexts, spans, strict=True)], dim=1)
    device_ops.write_kv(new[0], new[1], cache, batch)

    q = torch.randn(batch.num_tokens, num_heads, head_dim, generator=rng)
    got = device_ops.attention(q, cache, batch, scale, window)
    for index, context in enumerate(contexts):
        rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
        want = reference.attention(q[rows], *context, batch.positions[rows], scale, window)
        torch.testing.assert_close(got[rows], want, atol=2e-6, rtol=1e-5)


def make_history(batch: StepBatch) -> StepBatch:
    """What had been written before this batch."""
    slots, starts, lengths = [torch.empty(0, dtype=torch.int64)], [0], []
    for index, length in enumerate(batch.context_lens):
        before = length - (batch.query_starts[index + 1] - batch.query_starts[index])
        where = torch.arange(before)
        slots.append(batch.block_tables[index, where // BLOCK_TOKENS].long() * BLOCK_TOKENS + where % BLOCK_TOKENS)
        starts.append(starts[-1] + before)
        lengths.append(before)
    flat = torch.cat(slots)
    return StepBatch(
        token_ids=torch.zeros_like(flat),
        positions=torch.zeros_like(flat),
        slots=flat,
        query_starts=tuple(starts),
        context_lens=tuple(lengths),
        block_tables=batch.block_tables,
        logit_rows=flat,
        num_decodes=0,
    )
