"""The operators on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from . import cpu_attention, reference
from .batch import StepBatch
from .cpu_linear import DenseLinear
from .ops import CpuWeights, Linear, Numerics, Role
from .weights import Weight


class CpuOps:
    """Implements `ops.Ops`."""

    def __init__(self, dtype: torch.dtype, numerics: Numerics, weights: CpuWeights | None) -> None:
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.numerics = numerics
        self.weights = weights
        self.choices: Mapping[str, str] = {}

    def linear(self, weight: Weight, role: Role = "layer") -> Linear:
        return DenseLinear(weight, self.dtype)

    def allocate_kv(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int
    ) -> list[torch.Tensor]:
        return [
            cpu_attention.allocate(num_blocks, num_kv_heads, head_dim, self.dtype) for _ in range(num_layers)
        ]

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: StepBatch) -> None:
        cpu_attention.write(k, v, cache, batch)

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> torch.Tensor:
        return cpu_attention.attention(q, cache, batch, scale, window)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return reference.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.add_rms_norm(x, residual, weight, eps)

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.rotary(q, k, cos, sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return reference.silu_mul(gate_up)
