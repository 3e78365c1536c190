"""Ragged batch of one step in the form that kernels read; it is passed as an argument everywhere, never as a global."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_TOKENS = 16  # tokens per KV block; the same number as in the wire protocol


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Batch of one step: T new tokens of S sequences, flattened one sequence after the other.

        sequence s:   |<-- computed before -->|<-- new this step -->|
        positions      0 ..                    context_len - n .. context_len - 1
        rows of T                              query_starts[s] .. query_starts[s + 1] - 1

    Sequences with exactly one new token (decodes) come first; there are `num_decodes` of them.

    token_ids     int64 [T]
    positions     int64 [T]: absolute position of each new token in its sequence
    slots         int64 [T], block id * BLOCK_TOKENS + offset: where the K and V of each new token are written
    query_starts  S + 1 integers on the host
    context_lens  S integers on the host: tokens in KV once this step has written its own
    block_tables  int32 [S, B]: block ids in order, padded with 0 to the longest sequence
    logit_rows    int64 [R]: rows of T whose logits are wanted
    lengths       int32 [S]: `context_lens` on the device. Where it is given, kernels read the lengths from it, and
                  `context_lens` only have to be at least as large: a step that is captured once as a CUDA graph is
                  replayed with other lengths later
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
