"""Parts of a decoder layer. Each loads itself, and computes through the operators alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from ...kernels.batch import StepBatch
from ...kernels.canonical_weights import GroupedWeight
from ...kernels.layer_memory import LayerMemory, total_nbytes
from ...kernels.ops import Linear, Ops
from ...kernels.packed_layer import PackedLayerOps
from ..checkpoint.cache.repack_cache import NO_REPACK_CACHE, RepackCache
from ..checkpoint.reading.weight_loader import WeightLoader
from ..quantization.weight_format import LinearSpec, Span, WeightFormat, fuse_layer_weights
from .model_config import ModelConfig
from .sharding.ranks import Ranks
from .tensor_layout import EMBEDDING, HEAD, LayerSpec

P = TypeVar("P", "FusedLinear", Linear, torch.Tensor)

_NONE = [-1]  # stands in the cache for a layer without an order of inputs


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Source from which the parts of a decoder layer load themselves.

    ranks    ranks that the model is divided among; None: it is whole
    shelf    what an earlier start has repacked, or records what is repacked now
    before   parts of the same model with other values, by the names of the tensors that each was made of
    changed  tensors whose values differ from then: a part that uses none of them is taken from `before`
    made     the parts of this model, by the names of the tensors that each was made of
    """

    weights: WeightLoader
    format: WeightFormat
    ops: Ops
    ranks: Ranks | None = None
    shelf: RepackCache = NO_REPACK_CACHE
    before: Mapping[frozenset[str], LayerPart] = field(default_factory=dict)
    changed: Collection[str] = frozenset()
    made: dict[frozenset[str], LayerPart] = field(default_factory=dict)

    def part(self, names: Collection[str], make: Callable[[], P]) -> P:
        """Return the part that `make` makes of these tensors, and of no others; or the part from `before` if they are
        unchanged.
        """
        key = frozenset(names)
        if key in self.before and key.isdisjoint(self.changed):
            self.made[key] = self.before[key]
        else:
            self.made[key] = make()
        return self.made[key]  # type: ignore[return-value]  # a key stands for one kind of part

    def linear(self, *specs: LinearSpec) -> FusedLinear:
        """Return one operator for linears with the same input, or one each where they cannot be fused."""
        return self.part(self._names(*specs), lambda: self._linear(*specs))

    def _linear(self, *specs: LinearSpec) -> FusedLinear:
        def repacked() -> list[Linear]:
            loaded = [self.format.linear(self.weights, spec, self.ops.dtype) for spec in specs]
            return [self.ops.linear(weight) for weight in fuse_layer_weights(loaded)]

        return FusedLinear(self.shelf.linears("+".join(spec.name for spec in specs), repacked))

    def head(self, names: Collection[str], make: Callable[[], Linear]) -> Linear:
        """Return the vocabulary projection, made of these tensors. A head that is the embedding itself is not kept
        beside it.
        """

        def made() -> Linear:
            fresh: list[Linear] = []

            def own() -> list[Linear]:
                fresh.append(make())
                return [] if EMBEDDING in names and self._is_embedding(fresh[0]) else fresh

            found = self.shelf.linears(HEAD, own, role="head") or fresh
            return found[0] if found else make()

        return self.part(names, made)

    def _is_embedding(self, head: Linear) -> bool:
        """Return whether the head is the embedding itself, and could otherwise be kept in the cache. A head that cannot
        be kept is recorded as such instead.
        """
        shared = frozenset({EMBEDDING}) in self.made and head.held.given > 0
        return shared and isinstance(self.ops, PackedLayerOps) and self.ops.keeps(head)

    def _names(self, *specs: LinearSpec) -> set[str]:
        return {name for spec in specs for name in self.format.tensors(spec)}

    def summed(self, spec: LinearSpec, spans: Sequence[Span]) -> FusedLinear:
        """Return a linear whose inputs are divided among ranks: `spans` are each rank's."""
        return self.part(self._names(spec), lambda: self._summed(spec, spans))

    def _summed(self, spec: LinearSpec, spans: Sequence[Span]) -> FusedLinear:
        if self.ranks is None:
            return self._linear(spec)
        orders: list[torch.Tensor] = []

        def repacked() -> list[Linear]:
            weight = self.format.linear(self.weights, spec, self.ops.dtype)
            if isinstance(weight, GroupedWeight) and weight.permutation is not None:
                orders.append(weight.permutation.int())
                weight = replace(weight, permutation=None)
            return [self.ops.linear(weight)]

        parts = self.shelf.linears(spec.name, repacked)
        order = self.shelf.tensor(f"{spec.name}.order", lambda: orders[0] if orders else torch.tensor(_NONE).int())
        widths = [last - first for first, last in spans]
        return RowParallelLinear(parts, self.ranks, widths, None if len(order) == len(_NONE) else order)

    def table(self, name: str, *part: slice) -> torch.Tensor:
        """Return a norm's weight [N], or a part of the embedding [V, H], in the dtype of activations."""
        return self.part(
            {name},
            lambda: self.shelf.tensor(name, lambda: self.weights.take_finite(name, self.ops.dtype, *part, kept=True)),
        )


class FusedLinear:
    """Linears with one input, whose outputs are side by side: [M, sum of N]."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts

    @property
    def held(self) -> LayerMemory:
        return sum((part.held for part in self.parts), LayerMemory(0))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.parts) == 1:
            return self.parts[0](x)
        return torch.cat([part(x) for part in self.parts], dim=-1)


class RowParallelLinear(FusedLinear):
    """Linear of which each rank has some inputs: the sum of all ranks' products, on every rank.

    widths  number of inputs of each rank
    order   features of the whole input that this rank's columns belong to (GPTQ's desc_act scatters them: then all
            ranks' inputs are gathered first); None: the columns are the rank's own inputs in order
    """

    def __init__(
        self, parts: Sequence[Linear], ranks: Ranks, widths: Sequence[int], order: torch.Tensor | None
    ) -> None:
        super().__init__(parts)
        self._ranks, self._widths, self._order = ranks, widths, order

    @property
    def held(self) -> LayerMemory:
        return super().held + LayerMemory(total_nbytes(self._order))

    @property
    def gathered(self) -> int:
        """Number of features that the ranks gather before each product; 0 if none are."""
        return 0 if self._order is None else sum(self._widths)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._order is not None:
            x = self._ranks.exchange.gather(x, self._widths).index_select(1, self._order)
        return self._ranks.exchange.sum(super().__call__(x))


class Attention:
    """Causal self-attention with grouped KV heads, rope, and optionally a norm per head (qk-norm)."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, window: int | None, source: LayerSource) -> None:
        """Load the layer's attention. config: with as many heads as this rank has."""
        self.config, self.window, self.ops = config, window, source.ops
        self.qkv = source.linear(spec.q, spec.k, spec.v)
        parts = source.ranks.parts if source.ranks is not None else ()
        self.o = source.summed(spec.o, [part.features(config.head_dim) for part in parts])
        self.q_norm = source.table(spec.q_norm) if config.qk_norm else None
        self.k_norm = source.table(spec.k_norm) if config.qk_norm else None
        self.scale = config.head_dim**-0.5

    def __call__(self, x: torch.Tensor, rope: CosSin, cache: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Return attention's output [T, hidden] for x [T, hidden]; writes this step's keys and values into the
        cache.
        """
        q, k, v = self._heads(x)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.ops.rms_norm(q, self.q_norm, self.config.rms_norm_eps)
            k = self.ops.rms_norm(k, self.k_norm, self.config.rms_norm_eps)
        q = self.ops.rotary_write(q, k, v, *rope, cache, batch)
        context = self.ops.attention(q, cache, batch, self.scale, self.window)
        return self.o(context.reshape(x.shape[0], -1))

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [T, H, D], k and v [T, KH, D]: views of one projection."""
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        joined = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, dim)
        return joined[:, :heads], joined[:, heads : heads + kv_heads], joined[:, heads + kv_heads :]


class MLP:
    """Feed-forward part of a layer: down(silu(gate) * up)."""

    def __init__(self, spec: LayerSpec, source: LayerSource) -> None:
        self.ops = source.ops
        self.gate_up = source.linear(spec.gate, spec.up)
        self.down = source.summed(spec.down, [part.inner for part in source.ranks.parts] if source.ranks else ())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))


class Layer:
    """Decoder layer: norm, attention, norm, MLP, around one residual stream."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, window: int | None, source: LayerSource) -> None:
        self.ops, self.eps = source.ops, config.rms_norm_eps
        self.input_norm = source.table(spec.input_norm)
        self.attention = Attention(config, spec, window, source)
        self.post_attention_norm = source.table(spec.post_attention_norm)
        self.mlp = MLP(spec, source)

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        return self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down

    @property
    def held(self) -> LayerMemory:
        vectors = (self.input_norm, self.post_attention_norm, self.attention.q_norm, self.attention.k_norm)
        return sum((linear.held for linear in self.linears), LayerMemory(total_nbytes(*vectors)))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin, cache: torch.Tensor, batch: StepBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (output not yet added to the residual, residual), each [T, hidden]; the first layer is given no
        residual.
        """
        if residual is None:
            normed, residual = self.ops.rms_norm(x, self.input_norm, self.eps), x
        else:
            normed, residual = self.ops.add_rms_norm(x, residual, self.input_norm, self.eps)
        attended = self.attention(normed, rope, cache, batch)
        normed, residual = self.ops.add_rms_norm(attended, residual, self.post_attention_norm, self.eps)
        return self.mlp(normed), residual


LayerPart = FusedLinear | Linear | torch.Tensor
CosSin = tuple[torch.Tensor, torch.Tensor]  # cos, sin [T, D / 2] at this step's positions
