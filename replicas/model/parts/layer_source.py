"""Source from which the parts of a layer load themselves, and linears that are held as one or divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from ....kernels.canonical_weights import GroupedWeight
from ....kernels.layer_memory import LayerMemory, total_nbytes
from ....kernels.ops import Linear, Ops
from ...checkpoint.cache.repack_cache import NO_REPACK_CACHE, RepackCache
from ...checkpoint.reading.weight_loader import WeightLoader
from ...quantization.weight_format import LinearSpec, WeightFormat, fuse_layer_weights
from ..sharding.rank_shares import Exchange, RankShares

__all__ = ["CosSin", "FusedLinear", "FusedSpec", "LayerPart", "LayerSource", "RowParallelLinear", "VectorSpec"]

P = TypeVar("P", "FusedLinear", Linear, torch.Tensor)

_NONE = [-1]  # stands in the cache for a layer without an order of inputs


CosSin = tuple[torch.Tensor, torch.Tensor]  # cos, sin [T, D / 2] at this step's positions
VectorSpec = tuple[str, int]  # name in the checkpoint, and number of values


@dataclass(frozen=True, slots=True)
class FusedSpec:
    """Linears with one input, which are held as one where they can be.

    name    where a layer has them, as in "mlp.gate_up"
    inputs  how their inputs are divided among ranks, whose products are added up; None: all ranks have all inputs
    """

    name: str
    linears: tuple[LinearSpec, ...]
    inputs: RankShares | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of outputs and inputs that this rank has, all linears together."""
        shapes = [linear.shape for linear in self.linears]
        return sum(outputs for outputs, _ in shapes), shapes[0][1]


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Source from which the parts of a decoder layer load themselves.

    exchange      exchange of the ranks that the model is divided among; None: it is whole
    repack_cache  what an earlier start has repacked, or records what is repacked now
    before        parts of the same model with other values, by the names of the tensors that each was made of
    changed       tensors whose values differ from then: a part that uses none of them is taken from `before`
    made          the parts of this model, by the names of the tensors that each was made of
    """

    weights: WeightLoader
    format: WeightFormat
    ops: Ops
    exchange: Exchange | None = None
    repack_cache: RepackCache = NO_REPACK_CACHE
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

    def linear(self, spec: FusedSpec) -> FusedLinear:
        """Return one operator for linears with the same input, or one each where they cannot be fused; with inputs that
        are divided among ranks it adds up what these compute.
        """
        names = {name for linear in spec.linears for name in self.format.tensors(linear)}
        if self.exchange is None or spec.inputs is None:
            return self.part(names, lambda: self._fused(spec.linears))
        [linear], exchange, widths = spec.linears, self.exchange, spec.inputs.widths
        return self.part(names, lambda: self._summed(linear, exchange, widths))

    def _fused(self, specs: Sequence[LinearSpec]) -> FusedLinear:
        def repacked() -> list[Linear]:
            loaded = [self.format.linear(self.weights, spec, self.ops.dtype) for spec in specs]
            return [self.ops.linear(weight) for weight in fuse_layer_weights(loaded)]

        return FusedLinear(self.repack_cache.linears("+".join(spec.name for spec in specs), repacked))

    def _summed(self, spec: LinearSpec, exchange: Exchange, widths: Sequence[int]) -> FusedLinear:
        orders: list[torch.Tensor] = []

        def repacked() -> list[Linear]:
            weight = self.format.linear(self.weights, spec, self.ops.dtype)
            if isinstance(weight, GroupedWeight) and weight.permutation is not None:
                orders.append(weight.permutation.int())
                weight = replace(weight, permutation=None)
            return [self.ops.linear(weight)]

        parts = self.repack_cache.linears(spec.name, repacked)
        order = self.repack_cache.tensor(
            f"{spec.name}.order", lambda: orders[0] if orders else torch.tensor(_NONE).int()
        )
        return RowParallelLinear(parts, exchange, widths, None if len(order) == len(_NONE) else order)

    def table(self, name: str, *part: slice) -> torch.Tensor:
        """Return a norm's weight [N], or a part of the embedding [V, H], in the dtype of activations."""
        return self.part(
            {name},
            lambda: self.repack_cache.tensor(
                name, lambda: self.weights.take_finite(name, self.ops.dtype, *part, retained=True)
            ),
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
        self, parts: Sequence[Linear], exchange: Exchange, widths: Sequence[int], order: torch.Tensor | None
    ) -> None:
        super().__init__(parts)
        self._exchange, self._widths, self._order = exchange, widths, order

    @property
    def held(self) -> LayerMemory:
        return super().held + LayerMemory(total_nbytes(self._order))

    @property
    def gathered(self) -> int:
        """Number of features that the ranks gather before each product; 0 if none are."""
        return 0 if self._order is None else sum(self._widths)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._order is not None:
            x = self._exchange.gather(x, self._widths).index_select(1, self._order)
        return self._exchange.sum(super().__call__(x))


LayerPart = FusedLinear | Linear | torch.Tensor
