"""Format of unquantized tensors: fp32, fp16, bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.canonical_weights import DenseWeight
from ..weights import Weights
from .base import FLOATS, LinearSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Dense:
    """Unquantized format: a layer has `weight` [N, K] and perhaps `bias` [N]."""

    name: str = "none"
    quantizes_head: bool = False

    def tensors(self, linear: LinearSpec) -> dict[str, TensorSpec]:
        weight = TensorSpec((linear.out_features, linear.in_features), FLOATS)
        bias = {f"{linear.name}.bias": TensorSpec((linear.out_features,), FLOATS)} if linear.bias else {}
        return {f"{linear.name}.weight": weight, **bias}

    def linear(self, weights: Weights, linear: LinearSpec, dtype: torch.dtype) -> DenseWeight:
        weight = weights.take_finite(f"{linear.name}.weight", dtype, linear.outputs(), linear.inputs())
        return DenseWeight(weight, bias_of(weights, linear, dtype))

    def units(self, linear: LinearSpec) -> tuple[int, int]:
        return 1, 1


def bias_of(weights: Weights, linear: LinearSpec, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a layer's bias [N]; None where the layer, or this part of it, adds none.

    A bias that another part adds is taken from the weights as well, so that it does not count as left over.
    """
    if not linear.bias:
        return None
    bias = weights.take_finite(f"{linear.name}.bias", dtype, linear.outputs())
    return bias if linear.adds_bias else None
