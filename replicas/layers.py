"""The parts of a decoder layer. Each loads itself, and computes through the operators alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels.batch import StepBatch
from ..kernels.held import Held, size
from ..kernels.ops import Linear, Ops
from .config import ModelConfig
from .layout import LayerSpec
from .quantization.base import Format, LinearSpec, fuse
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Source:
    """What a layer loads itself from."""

    weights: Weights
    format: Format
    ops: Ops

    def linear(self, *specs: LinearSpec) -> Joined:
        """One operator for layers with the same input, or one each where they cannot be fused."""
        loaded = [self.format.linear(self.weights, spec, self.ops.dtype) for spec in specs]
        return Joined([self.ops.linear(weight) for weight in fuse(loaded)])

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight [N] in the dtype of the activations."""
        return self.weights.take_finite(name, self.ops.dtype)


class Joined:
    """Linears of one input, their outputs side by side: [M, sum of N]."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts

    @property
    def held(self) -> Held:
        return sum((part.held for part in self.parts), Held(0))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.parts) == 1:
            return self.parts[0](x)
        return torch.cat([part(x) for part in self.parts], dim=-1)


class Attention:
    """Causal self-attention with grouped KV heads, rope, and optionally a norm per head (qk-norm)."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, window: int | None, source: Source) -> None:
        self.config, self.window, self.ops = config, window, source.ops
        self.qkv = source.linear(spec.q, spec.k, spec.v)
        self.o = source.linear(spec.o)
        self.q_norm = source.vector(spec.q_norm) if config.qk_norm else None
        self.k_norm = source.vector(spec.k_norm) if config.qk_norm else None
        self.scale = config.head_dim**-0.5

    def __call__(self, x: torch.Tensor, rope: Rope, cache: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes this step's keys and values into the cache."""
        q, k, v = self._heads(x)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.ops.rms_norm(q, self.q_norm, self.config.rms_norm_eps)
            k = self.ops.rms_norm(k, self.k_norm, self.config.rms_norm_eps)
        q = self.ops.rotary_write(q, k, v, *rope, cache, batch)
        context = self.ops.attention(q, cache, batch, self.scale, self.window)
        return self.o(context.reshape(x.shape[0], -1))

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, D], k and v [T, KH, D]: views of one projection."""
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        joined = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, dim)
        return joined[:, :heads], joined[:, heads : heads + kv_heads], joined[:, heads + kv_heads :]


class MLP:
    """down(silu(gate) * up)."""

    def __init__(self, spec: LayerSpec, source: Source) -> None:
        self.ops = source.ops
        self.gate_up = source.linear(spec.gate, spec.up)
        self.down = source.linear(spec.down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))


class Layer:
    """Norm, attention, norm, MLP, around one residual stream."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, window: int | None, source: Source) -> None:
        self.ops, self.eps = source.ops, config.rms_norm_eps
        self.input_norm = source.vector(spec.input_norm)
        self.attention = Attention(config, spec, window, source)
        self.post_attention_norm = source.vector(spec.post_attention_norm)
        self.mlp = MLP(spec, source)

    @property
    def linears(self) -> tuple[Joined, ...]:
        return self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down

    @property
    def held(self) -> Held:
        vectors = (self.input_norm, self.post_attention_norm, self.attention.q_norm, self.attention.k_norm)
        return sum((linear.held for linear in self.linears), Held(size(*vectors)))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: Rope, cache: torch.Tensor, batch: StepBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output not yet added to the residual, residual), each [T, hidden]; the first layer has no residual."""
        if residual is None:
            normed, residual = self.ops.rms_norm(x, self.input_norm, self.eps), x
        else:
            normed, residual = self.ops.add_rms_norm(x, residual, self.input_norm, self.eps)
        attended = self.attention(normed, rope, cache, batch)
        normed, residual = self.ops.add_rms_norm(attended, residual, self.post_attention_norm, self.eps)
        return self.mlp(normed), residual


Rope = tuple[torch.Tensor, torch.Tensor]  # cos, sin [T, D / 2] at this step's positions
