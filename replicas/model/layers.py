"""Decoder layer: its plan, and the module that computes it around one residual stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter

import torch

from ...kernels.batch import StepBatch
from ...kernels.layer_memory import LayerMemory, total_nbytes
from ...kernels.ops import Ops
from ..quantization.weight_format import LinearSpec
from .parts.dense_feed_forward import DenseFeedForward
from .parts.layer_source import CosSin, FusedLinear, FusedSpec, LayerSource, VectorSpec
from .parts.softmax_attention import SoftmaxAttention

__all__ = ["FeedForward", "Layer", "LayerPlan", "Mixer", "allocate_kv"]

# Kinds of parts that layers have. Every other module asks a plan for what it needs to know of them.
Mixer = SoftmaxAttention
FeedForward = DenseFeedForward


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Plan of one layer: norm, attention, norm, feed-forward. Layers whose plans are equal are alike but for weights.

    index   number of the layer in the model
    hidden  features of the residual stream
    eps     epsilon of the norms
    """

    index: int = field(compare=False)
    hidden: int
    attention: Mixer
    mlp: FeedForward
    eps: float = 1e-6

    @property
    def linears(self) -> tuple[FusedSpec, ...]:
        return *self.attention.linears, *self.mlp.linears

    @property
    def specs(self) -> list[LinearSpec]:
        """Return the linears one by one, as the checkpoint has them."""
        return [linear for fused in self.linears for linear in fused.linears]

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """Return the layer's other tensors, by where a layer has them."""
        norms = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        own = {norm: (f"model.layers.{self.index}.{name}.weight", self.hidden) for norm, name in norms.items()}
        return {**own, **self.attention.vectors, **self.mlp.vectors}

    @property
    def elementwise_values(self) -> int:
        """Return how many numbers are read and written per token beside products and attention."""
        return 2 * 4 * self.hidden + self.attention.elementwise_values + self.mlp.elementwise_values

    @property
    def live_values(self) -> int:
        """Return how many numbers per token are alive at once."""
        return max(self.attention.live_values, self.mlp.live_values)

    @property
    def operations(self) -> int:
        """Return the operations of the products for one token."""
        return 2 * sum(outputs * inputs for outputs, inputs in (fused.shape for fused in self.linears))

    def divided(self, rank: int, size: int, unit: int) -> LayerPlan:
        """Return the plan of rank `rank` of `size`. Raises InvalidRequest where the layer cannot be divided so.

        unit  features of the feed-forward part that stay together
        """
        return replace(self, attention=self.attention.divided(rank, size), mlp=self.mlp.divided(rank, size, unit))


def allocate_kv(ops: Ops, layers: Sequence[LayerPlan], blocks: int) -> list[torch.Tensor]:
    """Return the KV of these layers, one tensor each. Raises ValueError for a kind that the operators lack."""
    alike = [(shape, len(list(same))) for shape, same in groupby(plan.attention.kv_shape for plan in layers)]
    return [cache for shape, count in alike for cache in ops.allocate_kv(count, blocks, *shape)]


class Layer:
    """Decoder layer: norm, attention, norm, feed-forward, around one residual stream."""

    def __init__(self, plan: LayerPlan, source: LayerSource) -> None:
        self.plan, self.ops, self.eps = plan, source.ops, plan.eps
        self.input_norm = source.table(plan.vectors["input_norm"][0])
        self.attention = plan.attention.load(source)
        self.post_attention_norm = source.table(plan.vectors["post_attention_norm"][0])
        self.mlp = plan.mlp.load(source)
        self._linears, self._vectors = attrgetter(*(fused.name for fused in plan.linears)), attrgetter(*plan.vectors)

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        found: tuple[FusedLinear, ...] = self._linears(self)
        return found

    @property
    def vectors(self) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self._vectors(self)
        return found

    @property
    def held(self) -> LayerMemory:
        return sum((linear.held for linear in self.linears), LayerMemory(total_nbytes(*self.vectors)))

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
