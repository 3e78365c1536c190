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
from ..tensor_layout import LayerSpec, head_format, head_spec, layer_spec

__all__ = ["TensorShard", "shard_for_rank"]


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Part of the model that rank `rank` of `size` holds, as half-open ranges.

    heads     query heads of every layer
    kv_heads  KV heads of every layer; with more ranks than KV heads some ranks have the same one
    inner     features between gate and up on one side, and down on the other
    tokens    tokens of the vocabulary
    """

    rank: int
    size: int
    heads: Span
    kv_heads: Span
    inner: Span
    tokens: Span

    def of_layer(self, spec: LayerSpec, head_dim: int) -> LayerSpec:
        """Return the layer's linears, each reduced to the rows or columns of this rank."""
        queries, keys = self.features(head_dim), _times(self.kv_heads, head_dim)
        return replace(
            spec,
            q=replace(spec.q, rows=queries),
            k=replace(spec.k, rows=keys),
            v=replace(spec.v, rows=keys),
            o=replace(spec.o, columns=queries),
            gate=replace(spec.gate, rows=self.inner),
            up=replace(spec.up, rows=self.inner),
            down=replace(spec.down, columns=self.inner),
        )

    def features(self, head_dim: int) -> Span:
        """Return the range of features of the rank's query heads together, in the output of q and the input of o."""
        return _times(self.heads, head_dim)

    def of_head(self, spec: LinearSpec) -> LinearSpec:
        return replace(spec, rows=self.tokens)

    def of_config(self, config: ModelConfig) -> ModelConfig:
        """Return the config with the sizes of this rank's attention and MLP; the vocabulary and the model's width stay
        the same.
        """
        return replace(
            config,
            num_heads=self.heads[1] - self.heads[0],
            num_kv_heads=self.kv_heads[1] - self.kv_heads[0],
            intermediate_size=self.inner[1] - self.inner[0],
        )


def shard_for_rank(config: ModelConfig, format: WeightFormat, rank: int, size: int) -> TensorShard:
    """Return the part of rank `rank` of `size`. Raises InvalidRequest, naming the layer that cannot be divided so."""
    heads, kv_heads = _heads(config, rank, size)
    head = head_spec(config)
    specs = [layer_spec(config, index) for index in range(config.num_layers)]
    inner = math.lcm(*(unit for spec in specs for unit in _inner_units(format, spec)))
    part = TensorShard(
        rank,
        size,
        heads,
        kv_heads,
        _share(specs[0].down.name, config.intermediate_size, inner, rank, size),
        _share(head.name, config.vocab_size, head_format(format).units(head)[0], rank, size),
    )
    for spec in specs:
        divided = part.of_layer(spec, config.head_dim)
        for linear in (divided.q, divided.k, divided.v, divided.o):
            _check(linear, format)
    return part


def _inner_units(format: WeightFormat, spec: LayerSpec) -> tuple[int, int, int]:
    return format.units(spec.gate)[0], format.units(spec.up)[0], format.units(spec.down)[1]


def _heads(config: ModelConfig, rank: int, size: int) -> tuple[Span, Span]:
    """Return the ranges of a rank's query heads, and of the KV heads that these read."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if kv_heads >= size:
        own = _part(kv_heads, rank, size)
        return _times(own, heads // kv_heads), own
    if size % kv_heads or heads % size:
        raise InvalidRequest(
            f"tensor_parallel: {size} ranks cannot share {kv_heads} KV heads and {heads} heads; expected up to "
            f"{kv_heads} ranks, or a multiple of it that divides {heads}",
            param="tensor_parallel",
        )
    of_kv = rank * kv_heads // size
    return _part(heads, rank, size), (of_kv, of_kv + 1)


def _share(name: str, total: int, unit: int, rank: int, size: int) -> Span:
    """Return a rank's range of `total` features in whole units: as many as each other rank has, or one more or less.

    The last unit may be cut short. Raises InvalidRequest where there are fewer units than ranks.
    """
    units = -(-total // unit)
    if units < size:
        raise InvalidRequest(
            f"tensor_parallel: {total} features of {name} are {units} whole groups of {unit}, too few for {size} ranks",
            param="tensor_parallel",
        )
    first, last = _times(_part(units, rank, size), unit)
    return first, min(last, total)


def _check(linear: LinearSpec, format: WeightFormat) -> None:
    """Raise InvalidRequest unless the rows and columns of a linear are whole units of its format."""
    sides = (("outputs", linear.rows, linear.out_features), ("inputs", linear.columns, linear.in_features))
    for unit, (what, span, total) in zip(format.units(linear), sides, strict=True):
        if span is not None and any(edge % unit and edge != total for edge in span):
            raise InvalidRequest(
                f"tensor_parallel: {what} {span[0]} to {span[1]} of {linear.name} are not whole groups of {unit}",
                param="tensor_parallel",
            )


def _part(count: int, rank: int, size: int) -> Span:
    return count * rank // size, count * (rank + 1) // size


def _times(span: Span, unit: int) -> Span:
    return span[0] * unit, span[1] * unit
