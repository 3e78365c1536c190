"""The decoder that all families share, over the flat tokens of one step."""

from __future__ import annotations

import torch

from ..kernels.batch import StepBatch
from ..kernels.held import Held, size
from ..kernels.ops import Linear, Ops
from ..kernels.weights import DenseWeight
from .config import ModelConfig
from .layers import Layer, Source
from .layout import EMBEDDING, FINAL_NORM, HEAD, head_format, head_is_tied, head_spec, layer_spec
from .quantization.base import Format
from .rope import RotaryTable
from .weights import Weights


class Decoder:
    """Token ids in, logits out.

    KV lives with the caller: `kv` is what `ops.allocate_kv` gave, one tensor per layer. Weights are only read,
    so that one decoder may serve any number of caches, one step at a time.
    """

    def __init__(self, config: ModelConfig, format: Format, weights: Weights, ops: Ops) -> None:
        """Takes every tensor of the layout from `weights`. Raises CheckpointError naming file and tensor."""
        source = Source(weights, format, ops)
        self.config, self.ops, self.tied = config, ops, head_is_tied(config, format)
        self.embedding = weights.take_finite(EMBEDDING, ops.dtype)
        self.layers = [
            Layer(config, layer_spec(config, index), window, source) for index, window in enumerate(config.windows)
        ]
        self.norm = source.vector(FINAL_NORM)
        self.head = self._load_head(format, weights)
        self.rotary = RotaryTable(config.rope, config.head_dim, ops.device)

    def _load_head(self, format: Format, weights: Weights) -> Linear:
        if not self.tied:
            spec = head_spec(self.config)
            return self.ops.linear(head_format(format).linear(weights, spec, self.ops.dtype), role="head")
        if (copy := f"{HEAD}.weight") in weights:
            weights.take(copy)  # known to equal the embedding
        return self.ops.linear(DenseWeight(self.embedding), role="head")

    @property
    def held(self) -> Held:
        """What all weights keep, all copies counted, and what a tied head shares with the embedding once."""
        tables = Held(size(self.embedding, self.norm) - (self.head.held.given if self.tied else 0))
        return sum((layer.held for layer in self.layers), tables + self.head.held)

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        """Logits fp32 [R, vocabulary] of `batch.logit_rows`; writes this step's keys and values."""
        x, residual = self._layers(batch, kv)
        rows = batch.logit_rows
        if not rows.numel():  # a piece of a prompt that is not its last
            return x.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self.logits(self._normed(x[rows], residual[rows]))

    @torch.inference_mode()
    def hidden(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        """The last hidden states [T, hidden], normalised: `logits` of any rows of it gives their logits."""
        return self._normed(*self._layers(batch, kv))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> fp32 [R, vocabulary]."""
        if not len(hidden):  # a step of pieces of prompts
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self.head(hidden).float()

    def _normed(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.ops.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]

    def _layers(self, batch: StepBatch, kv: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.rotary.at(batch.positions, max(batch.context_lens))
        x, residual = self.embedding[batch.token_ids], None
        for layer, cache in zip(self.layers, kv, strict=True):
            x, residual = layer(x, residual, rope, cache, batch)
        assert residual is not None, "a decoder has at least one layer"
        return x, residual
