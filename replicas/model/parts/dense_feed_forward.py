"""Dense feed-forward part of a layer: down(silu(gate) * up)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from ...quantization.weight_format import LinearSpec, WeightFormat
from ..sharding.rank_shares import RankShares, divide_units
from .layer_source import FusedSpec, LayerSource, VectorSpec

__all__ = ["MLP", "DenseFeedForward"]


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """Plan of a layer's feed-forward part, of which all tokens use all weights.

    name    prefix of its tensors in the checkpoint
    hidden  features of its input and output
    inner   features between gate and up on one side, and down on the other, and which of them this rank has
    """

    operators: ClassVar = ("silu_mul",)
    vectors: ClassVar[Mapping[str, VectorSpec]] = {}

    name: str = field(compare=False)
    hidden: int
    inner: RankShares
    bias: bool = False

    @property
    def linears(self) -> tuple[FusedSpec, ...]:
        total, part = self.inner.total, self.inner.part
        gate, up = (
            LinearSpec(f"{self.name}.{name}_proj", total, self.hidden, self.bias, rows=part) for name in ("gate", "up")
        )
        down = LinearSpec(f"{self.name}.down_proj", self.hidden, total, self.bias, columns=part)
        return FusedSpec("mlp.gate_up", (gate, up)), FusedSpec("mlp.down", (down,), self.inner)

    @property
    def elementwise_values(self) -> int:
        """Return how many numbers are read and written per token beside products: by gate times up."""
        return 3 * self.inner.count

    @property
    def live_values(self) -> int:
        """Return how many numbers per token are alive at once: input, normed input, residual, output and what attention
        gave; gate and up, and their product.
        """
        return 5 * self.hidden + 3 * self.inner.count

    def units(self, format: WeightFormat) -> list[int]:
        """Return the numbers of inner features that its linears keep together in a format."""
        return [format.units(spec)[fused.inputs is not None] for fused in self.linears for spec in fused.linears]

    def divided(self, rank: int, size: int, unit: int) -> DenseFeedForward:
        """Return the plan of rank `rank` of `size`, whose share is whole units. Raises InvalidRequest where there are
        too few.
        """
        return replace(self, inner=divide_units(f"{self.name}.down_proj", self.inner.total, unit, rank, size))

    def load(self, source: LayerSource) -> MLP:
        return MLP(self, source)


class MLP:
    """Feed-forward part of one layer; its inner features are those that this rank has."""

    def __init__(self, plan: DenseFeedForward, source: LayerSource) -> None:
        self.ops = source.ops
        self.gate_up, self.down = map(source.linear, plan.linears)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))
