"""The choice of operators for a device, made here, once, with its reason."""

from __future__ import annotations

import torch

from .contract import CpuWeights, Linear, Numerics, Ops, Role
from .cpu.native import load
from .cpu.operators import CpuOps

__all__ = ["CpuWeights", "Linear", "Numerics", "Ops", "Role", "choose_dtype", "for_device", "has_bf16_arithmetic"]


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
    if load()[0]:
        return torch.bfloat16, "the C kernels take bf16 on any CPU"
    return torch.float32, "this CPU has no bf16 arithmetic, and there are no C kernels"


def has_bf16_arithmetic() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and torch.cpu._is_avx512_bf16_supported()
