"""Decoder that all families share, computed over the flat tokens of one step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ...kernels.batch import StepBatch
from ...kernels.canonical_weights import DenseWeight
from ...kernels.layer_memory import LayerMemory, total_nbytes
from ...kernels.ops import Linear, Ops
from ...kernels.packed_layer import PackedLayerOps
from ..checkpoint.cache.repack_cache import NO_REPACK_CACHE, RepackCache
from ..checkpoint.reading.weight_loader import MetaWeightLoader, WeightLoader
from ..host.threaded_tasks import run_in_threads
from ..quantization.weight_format import WeightFormat
from .layers import Layer
from .model_config import ModelConfig
from .parts.layer_source import CosSin, LayerPart, LayerSource
from .rotary_embedding import RotaryTable
from .sharding.ranks import Ranks
from .sharding.stages import PipelineStage
from .tensor_layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    head_format,
    head_is_tied,
    head_spec,
    whole_stage,
)

HiddenStream = tuple[torch.Tensor, torch.Tensor]  # output not yet added to the residual, residual: each [T, hidden]


class EmbeddingRows(Protocol):
    """An embedding that is not in memory: rows are read when they are wanted."""

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor: ...


class OffloadTier(Protocol):
    """Where those layers are that are not all in memory, or not all on the device."""

    @property
    def held(self) -> LayerMemory: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class Decoder:
    """Decoder model: token ids in, logits out. A pipeline stage holds a part of the layers, and takes and gives their
    stream.

    KV lives with the caller: `kv` is what `ops.allocate_kv` returned, one tensor per layer. Weights are only read,
    so that one decoder may serve any number of caches, one step at a time.
    """

    embedding: torch.Tensor | EmbeddingRows  # [V, hidden]; only the first stage has it
    norm: torch.Tensor  # [hidden]; only the last stage has it, and the head
    head: Linear
    layers: list[Layer]
    tier: OffloadTier | None = None  # keeps weights that are not in memory, or not on the device; None: all are

    def __init__(
        self,
        config: ModelConfig,
        format: WeightFormat,
        weights: WeightLoader,
        ops: Ops,
        ranks: Ranks | None = None,
        stage: PipelineStage | None = None,
        repack_cache: RepackCache = NO_REPACK_CACHE,
        *,
        before: Decoder | None = None,
        changed: Collection[str] = frozenset(),
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Take every tensor of the layout from `weights`, or the part of them that a rank and a stage need.

        ranks         ranks that divide the layers: then `kv` holds this rank's heads, and every rank computes each step
        stage         pipeline stage whose layers these are: then `kv` covers those layers. None: all layers
        repack_cache  repacked weights of an earlier start, which are then not read from `weights`; or records what is
                      repacked
        before        the same model with other values of the tensors in `changed`: parts that use none of those are
                      shared with it, and only the others are loaded
        numbers       layers of the stage to be made, from 0; None: all

        Raises CheckpointError naming file and tensor.
        """
        exchange = None if ranks is None else ranks.exchange
        source = LayerSource(
            weights, format, ops, exchange, repack_cache, {} if before is None else before.made, changed
        )
        self.made: dict[frozenset[str], LayerPart] = source.made  # by the names of the tensors that each was made of
        self.config, self.ops, self.tied = config, ops, head_is_tied(config, format)
        self.ranks, self.stage = ranks, stage or whole_stage(config)
        if self.stage.is_first:
            self.embedding = source.table(EMBEDDING, *self._tokens)
        self.local = self.stage.of_config(config if ranks is None else ranks.own.config)
        plans = [self.local.layers[number] for number in numbers or range(self.local.num_layers)]
        tasks: list[Callable[[], Any]] = [partial(Layer, plan, source) for plan in plans]
        if self.stage.is_last:
            self.norm = source.table(FINAL_NORM)
            tasks.insert(0, partial(self._make_head, source))
        alone = ranks is None and self.stage.count == 1 and before is None  # new weights beside steps are built slowly
        beside = (
            alone and ops.device.type == "cpu" and not (repack_cache.in_order or isinstance(weights, MetaWeightLoader))
        )
        made = run_in_threads(tasks) if beside else [make() for make in tasks]
        if self.stage.is_last:
            self.head = made.pop(0)
        self.layers = made
        self.rotary: RotaryTable = (
            RotaryTable(config.rope, config.rotary_dim, ops.device) if before is None else before.rotary
        )

    def _make_head(self, source: LayerSource) -> Linear:
        """Return the vocabulary projection. A head that is the embedding itself is not kept beside it."""
        names = {*head_format(source.format).tensors(head_spec(self.config)), *([EMBEDDING] if self.tied else [])}
        load = partial(self._load_head, source.format, source.weights)

        def made() -> Linear:
            fresh: list[Linear] = []

            def own() -> list[Linear]:
                fresh.append(load())
                return [] if self._is_embedding(fresh[0]) else fresh

            found = source.repack_cache.linears(HEAD, own, role="head") or fresh
            return found[0] if found else load()

        return source.part(names, made)

    def _is_embedding(self, head: Linear) -> bool:
        """Return whether the head is the embedding itself, and could otherwise be kept in the cache. A head that cannot
        be kept is recorded as such instead.
        """
        shared = self.tied and self.stage.is_first and head.held.given > 0
        return shared and isinstance(self.ops, PackedLayerOps) and self.ops.keeps(head)

    def _load_head(self, format: WeightFormat, weights: WeightLoader) -> Linear:
        if not self.tied:
            spec = head_spec(self.config)
            spec = spec if self.ranks is None else self.ranks.own.of_head(spec)
            return self.ops.linear(head_format(format).linear(weights, spec, self.ops.dtype), role="head")
        if (copy := f"{HEAD}.weight") in weights:
            weights.take(copy, *self._tokens)  # was checked to equal the embedding
        table = self.embedding if self.stage.is_first else weights.take_finite(EMBEDDING, self.ops.dtype, *self._tokens)
        assert isinstance(table, torch.Tensor), "an embedding on disk has its head on disk too"
        return self.ops.linear(DenseWeight(table), role="head")

    @property
    def _tokens(self) -> tuple[slice, ...]:
        """Rows of the embedding that this rank holds; empty: all."""
        return () if self.ranks is None else (slice(*self.ranks.own.tokens),)

    @property
    def held(self) -> LayerMemory:
        """Memory of all weights, all copies counted; what a tied head shares with the embedding counts once."""
        held = sum((layer.held for layer in self.layers), LayerMemory(0))
        if self.stage.is_first:
            held += LayerMemory(self.embedding.nbytes)
        if self.stage.is_last:
            shared = self.head.held.given if self.tied and self.stage.is_first else 0
            held += LayerMemory(total_nbytes(self.norm) - shared) + self.head.held
        if self.tier is not None:
            held += self.tier.held
        return held

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    def forget(self) -> None:
        """Stop the reading of weights from disk or host, since nothing is computed with this decoder any more."""
        if self.tier is not None:
            self.tier.stop()

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: list[torch.Tensor], stream: HiddenStream | None = None) -> torch.Tensor:
        """Return logits fp32 [R, vocabulary] of `batch.logit_rows`; writes this step's keys and values.

        stream  output of the stage before; None: the first stage begins with the tokens
        """
        return self.ended(batch, self.through(batch, kv, stream))

    @torch.inference_mode()
    def ended(self, batch: StepBatch, stream: HiddenStream) -> torch.Tensor:
        """Return the logits fp32 [R, vocabulary] of `batch.logit_rows`, from the last layer's output."""
        x, residual = stream
        rows = batch.logit_rows
        if not rows.numel():  # a piece of a prompt that is not its last
            return x.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self.logits(self.normed(x[rows], residual[rows]))

    @torch.inference_mode()
    def hidden(self, batch: StepBatch, kv: list[torch.Tensor], stream: HiddenStream | None = None) -> torch.Tensor:
        """Return the last hidden states [T, hidden], normalised: `logits` of any of its rows gives the logits of those
        rows.
        """
        return self.normed(*self.through(batch, kv, stream))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits fp32 [R, vocabulary] of hidden states [R, hidden]."""
        if not len(hidden):  # a step of pieces of prompts
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        logits = self.head(hidden).float()
        return logits if self.ranks is None else self.ranks.logits(logits)

    def normed(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.ops.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]

    @torch.inference_mode()
    def through(self, batch: StepBatch, kv: list[torch.Tensor], stream: HiddenStream | None = None) -> HiddenStream:
        """Compute this stage's layers on the output of the stage before, or on the tokens; writes keys and values."""
        assert (stream is None) == self.stage.is_first, "the first stage alone begins with tokens"
        rope = self.rope(batch)
        x, residual = (self.embedded(batch.token_ids), None) if stream is None else stream
        for layer, cache in zip(self.layers, kv, strict=True):
            x, residual = layer(x, residual, rope, cache, batch)
        assert residual is not None, "a decoder has at least one layer"
        return x, residual

    def rope(self, batch: StepBatch) -> CosSin:
        """Return the cosines and sines of rotary embeddings at the positions of the step."""
        return self.rotary.at(batch.positions, max(batch.context_lens))

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, hidden] of token ids [T]."""
        if self.ranks is None:
            return self.embedding[ids]
        assert isinstance(self.embedding, torch.Tensor), "of a model that is divided all is in memory"
        return self.ranks.embed(self.embedding, ids)
