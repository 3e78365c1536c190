"""Driving a decoder without an engine: one sequence, its own KV blocks, step after step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from motley.kernels.batch import BLOCK_TOKENS, StepBatch
from motley.kernels.ops import Ops, ops_for_device
from motley.replicas.loading.model_loader import Decoder, load_model


def chunk_batch(token_ids: Sequence[int], computed: int, blocks: Sequence[int]) -> StepBatch:
    """One sequence's next tokens, `computed` of them being in KV already; logits for every one."""
    count, total = len(token_ids), computed + len(token_ids)
    positions = torch.arange(computed, total)
    table = torch.tensor(blocks)
    return StepBatch(
        token_ids=torch.tensor(token_ids),
        positions=positions,
        slots=table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS,
        query_starts=(0, count),
        context_lens=(total,),
        block_tables=table[None, : -(-total // BLOCK_TOKENS)].int(),
        logit_rows=torch.arange(count),
        num_decodes=int(count == 1),
    )


class Session:
    """One sequence on a decoder. Its KV blocks run backwards, so that a wrong table shows."""

    def __init__(self, decoder: Decoder, max_tokens: int = 256) -> None:
        config, needed = decoder.config, -(-max_tokens // BLOCK_TOKENS)
        self.decoder = decoder
        self.blocks = list(range(needed, 0, -1))
        self.kv = decoder.ops.allocate_kv(config.num_layers, needed + 1, *decoder.local.kv_shape)
        self.computed = 0

    def feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits fp32 [len(token_ids), vocabulary]."""
        batch = chunk_batch(token_ids, self.computed, self.blocks)
        self.computed += len(token_ids)
        return self.decoder.forward(batch, self.kv)

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
        """`count` tokens after the prompt, and the logits [count, vocabulary] they were taken from."""
        rows = [self.feed(prompt)[-1]]
        while len(rows) < count:
            rows.append(self.feed([int(rows[-1].argmax())])[-1])
        logits = torch.stack(rows)
        return logits.argmax(-1).tolist(), logits


def exact_ops(dtype: torch.dtype = torch.float32) -> Ops:
    return ops_for_device("cpu", dtype, numerics="exact")


def prompt_logits(folder: object, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of a whole prompt from a checkpoint in fp32."""
    return Session(load_model(str(folder), exact_ops()).decoder).feed(token_ids)
