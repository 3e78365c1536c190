"""Format of unquantized tensors: fp32, fp16, bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.canonical_weights import DenseWeight
from ..checkpoint.reading.weight_loader import WeightLoader
from .weight_format import FLOAT_DTYPES, LinearSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Dense:
    """Unquantized format: a layer has `weight` [N, K] and perhaps `bias` [N]."""

    name: str = "none"
    quantizes_head: bool = False

    def tensors(self, linear: LinearSpec) -> dict[str, TensorSpec]:
        weight = TensorSpec((linear.out_features, linear.in_features), FLOAT_DTYPES)
        bias = {f"{linear.name}.bias": TensorSpec((linear.out_features,), FLOAT_DTYPES)} if linear.bias else {}
        return {f"{linear.name}.weight": weight, **bias}

    def linear(self, weights: WeightLoader, linear: LinearSpec, dtype: torch.dtype) -> DenseWeight:
        weight = weights.take_finite(f"{linear.name}.weight", dtype, linear.outputs(), linear.inputs())
        return DenseWeight(weight, take_bias(weights, linear, dtype))

    def units(self, linear: LinearSpec) -> tuple[int, int]:
        return 1, 1


def take_bias(weights: WeightLoader, linear: LinearSpec, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a layer's bias [N]; None where the layer, or this part of it, adds none.

    A bias that another part adds is taken from the weights as well, so that it does not count as left over.
    """
    if not linear.bias:
        return None
    bias = weights.take_finite(f"{linear.name}.bias", dtype, linear.outputs())
    return bias if linear.adds_bias else None
