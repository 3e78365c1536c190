"""The operators a model is made of, and the choice of their implementation for a device.

A model calls only this protocol; which kernel stands behind each call is decided here, once, with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch

from .batch import StepBatch
from .weights import Weight

Numerics = Literal["exact", "fast"]
CpuWeights = Literal["int4", "int8", "both", "dense"]
Role = Literal["layer", "head"]


class Linear(Protocol):
    """y [M, N] = x [M, K] @ w.T + bias, in the dtype of x, for any M >= 1."""

    kernel: str  # its name in the op table
    nbytes: int  # what it holds, all copies counted

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Ops(Protocol):
    """One device's operators. Activations are `dtype`; T is the number of new tokens in the step.

    numerics "exact": a row's result does not depend on what else is in the batch, on chunking or on prefix
    hits. "fast": may switch kernels by M, within the bound that each kernel states.
    """

    device: torch.device
    dtype: torch.dtype
    numerics: Numerics
    choices: Mapping[str, str]  # what was chosen for each op -> why

    def linear(self, weight: Weight, role: Role = "layer") -> Linear:
        """Repack a weight for this device. "head": the vocabulary projection."""
        ...

    def allocate_kv(self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int) -> list[torch.Tensor]:
        """One cache tensor per layer, in whatever layout this device's attention wants."""
        ...

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: StepBatch) -> None:
        """k, v [T, KH, D] into the slots of this step."""
        ...

    def rotary_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        batch: StepBatch,
    ) -> torch.Tensor:
        """`rotary`, then `write_kv` of the rotated keys and of v, in one pass; returns the rotated q."""
        ...

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention of q [T, H, D] over each sequence's own context; returns [T, H, D].

        window: a query at position p sees positions p - window + 1 .. p; None sees all.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., N] normalised over its last dimension, in fp32, times weight [N]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate halves: q [T, H, D], k [T, KH, D], cos and sin fp32 [T, D / 2] already at the positions."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [T, 2 * I] = [gate | up]; returns [T, I]."""
        ...


def for_device(
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    numerics: Numerics = "exact",
    cpu_weights: CpuWeights | None = None,
) -> Ops:
    """The operators of a device.

    dtype        of the activations and of KV: float32 or bfloat16 on a CPU
    cpu_weights  how a CPU holds quantized weights: "int4" as stored; "int8" a byte each; "both" where int4 and
                 int8 need different kernels; "dense" dequantised to `dtype`. None: dense for float32, as
                 stored for bfloat16. Unless dense, the vocabulary head is held in int8

    Raises ValueError naming what the device cannot do.
    """
    device = torch.device(device)
    if device.type != "cpu":
        raise ValueError(f"device: {device} has no operators; expected cpu")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype: {dtype} is not computed on a CPU; expected float32 or bfloat16")
    # here, since these implement what this module declares
    from .cpu import CpuOps
    from .cpu_native import load

    native, reason = load()
    return CpuOps(dtype, numerics, cpu_weights, native, reason)


def choose_dtype(device: torch.device | str, checkpoint_dtype: torch.dtype) -> tuple[torch.dtype, str]:
    """The activation dtype for `dtype="auto"`, and why."""
    device = torch.device(device)
    if device.type != "cpu":
        raise ValueError(f"device: {device} has no operators; expected cpu")
    if checkpoint_dtype == torch.float32:
        return torch.float32, "the checkpoint is fp32"
    if has_bf16_arithmetic():
        return torch.bfloat16, "this CPU multiplies bf16 (AVX512-BF16 or AMX)"
    return torch.float32, "this CPU has no bf16 arithmetic; fp32 is faster"


def has_bf16_arithmetic() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and torch.cpu._is_avx512_bf16_supported()
