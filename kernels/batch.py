"""One step's ragged batch as the kernels see it. An argument everywhere, never a global."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_TOKENS = 16  # tokens per KV block; equals the protocol's


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T new tokens of S sequences, flattened sequence after sequence.

        sequence s:   |<-- computed before -->|<-- new this step -->|
        positions      0 ..                    context_len - n .. context_len - 1
        rows of T                              query_starts[s] .. query_starts[s + 1] - 1

    Sequences with exactly one new token (decodes) come first; there are `num_decodes` of them.

    token_ids     int64 [T]
    positions     int64 [T]   absolute position of each new token
    slots         int64 [T]   block id * BLOCK_TOKENS + offset: where each new token's K and V go
    query_starts  S + 1 host integers
    context_lens  S host integers: tokens in KV once this step has written its own
    block_tables  int32 [S, B]  block ids in order, padded with 0 to the longest
    logit_rows    int64 [R]   rows of T whose logits are wanted
    lengths       int32 [S]   context_lens on the device. Where given kernels go by these, and context_lens need only
                              be as large: a step that is captured once runs with others later
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    num_decodes: int
    lengths: torch.Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]
