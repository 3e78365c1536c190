"""Division of every layer among tensor-parallel ranks (Shoeybi et al., Megatron-LM, 2019).

The outputs of q, k, v, gate and up are divided, by whole heads and by whole quantization groups of the linear that
reads them; o and down take the matching inputs, and their outputs are summed over ranks. The embedding and the head are
divided by tokens. So a layer needs two sums: one for its attention and one for its MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...errors import InvalidRequest
from ...quantization.weight_format import LinearSpec, Span, WeightFormat
from ..model_config import ModelConfig
from ..tensor_layout import head_format, head_spec
from .rank_shares import divide_units

__all__ = ["TensorShard", "shard_for_rank"]


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Part of the model that rank `rank` of `size` holds.

    config  config of the model, with the plans of this rank's parts of all layers
    tokens  range of the tokens of the vocabulary
    """

    rank: int
    size: int
    config: ModelConfig
    tokens: Span

    def of_head(self, spec: LinearSpec) -> LinearSpec:
        return replace(spec, rows=self.tokens)


def shard_for_rank(config: ModelConfig, format: WeightFormat, rank: int, size: int) -> TensorShard:
    """Return the part of rank `rank` of `size`. Raises InvalidRequest, naming the layer that cannot be divided so."""
    unit = math.lcm(*(unit for plan in config.layers for unit in plan.mlp.units(format)))
    layers = tuple(plan.divided(rank, size, unit) for plan in config.layers)
    head = head_spec(config)
    tokens = divide_units(head.name, config.vocab_size, head_format(format).units(head)[0], rank, size).own
    for linear in (linear for plan in layers for linear in plan.specs):
        _check(linear, format)
    return TensorShard(rank, size, replace(config, layers=layers), tokens)


def _check(linear: LinearSpec, format: WeightFormat) -> None:
    """Raise InvalidRequest unless the rows and columns of a linear are whole units of its format."""
    sides = (("outputs", linear.rows, linear.out_features), ("inputs", linear.columns, linear.in_features))
    for unit, (what, span, total) in zip(format.units(linear), sides, strict=True):
        if span is not None and any(edge % unit and edge != total for edge in span):
            raise InvalidRequest(
                f"tensor_parallel: {what} {span[0]} to {span[1]} of {linear.name} are not whole groups of {unit}",
                param="tensor_parallel",
            )
