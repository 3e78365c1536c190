"""Unquantized tensors: fp32, fp16, bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.weights import DenseWeight
from ..weights import Weights
from .base import FLOATS, LinearSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Dense:
    """`weight` [N, K] and perhaps `bias` [N]."""

    name: str = "none"
    quantizes_head: bool = False

    def tensors(self, linear: LinearSpec) -> dict[str, TensorSpec]:
        weight = TensorSpec((linear.out_features, linear.in_features), FLOATS)
        bias = {f"{linear.name}.bias": TensorSpec((linear.out_features,), FLOATS)} if linear.bias else {}
        return {f"{linear.name}.weight": weight, **bias}

    def linear(self, weights: Weights, linear: LinearSpec, dtype: torch.dtype) -> DenseWeight:
        bias = weights.take_finite(f"{linear.name}.bias", dtype) if linear.bias else None
        return DenseWeight(weights.take_finite(f"{linear.name}.weight", dtype), bias)
