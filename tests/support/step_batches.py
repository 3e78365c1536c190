"""Step batches over scattered KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from motley.kernels.batch import BLOCK_TOKENS, StepBatch

Span = tuple[int, int]  # tokens computed before, new tokens


def block_tables(lengths: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """int32 [S, B]: room for so many tokens in each sequence, blocks in no order."""
    widths = [-(-length // BLOCK_TOKENS) for length in lengths]
    free = torch.randperm(sum(widths) + 3, generator=generator).int()
    tables = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
    for row, (blocks, width) in enumerate(zip(torch.split(free[: sum(widths)], widths), widths, strict=True)):
        tables[row, :width] = blocks
    return tables


def step_batch(spans: Sequence[Span], tables: torch.Tensor) -> StepBatch:
    """The step that computes each span, in rows of `tables`. Decodes (one new token) must come first."""
    positions, slots, starts = [], [], [0]
    for row, (before, new) in enumerate(spans):
        where = torch.arange(before, before + new)
        positions.append(where)
        slots.append(tables[row, where // BLOCK_TOKENS].long() * BLOCK_TOKENS + where % BLOCK_TOKENS)
        starts.append(starts[-1] + new)
    return StepBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_starts=tuple(starts),
        context_lens=tuple(before + new for before, new in spans),
        block_tables=tables,
        logit_rows=torch.arange(starts[-1]),
        num_decodes=sum(new == 1 for _, new in spans),
    )
