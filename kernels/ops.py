"""Choice of the operators of a device; it is made here, once, and carries its reason."""

from __future__ import annotations

import torch

from .contract import CpuWeights, KvDtype, Linear, Numerics, Ops, Role
from .cpu.c_kernels.native_kernels import load_native_kernels
from .cpu.cpu_ops import CpuOps
from .device.dtypes import TORCH_DTYPES
from .device.precision import policy_of

__all__ = [
    "CpuWeights",
    "KvDtype",
    "Linear",
    "Numerics",
    "Ops",
    "Role",
    "choose_dtype",
    "has_bf16_arithmetic",
    "ops_for_device",
]


def ops_for_device(
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    numerics: Numerics | None = None,
    cpu_weights: CpuWeights | None = None,
    kv_dtype: KvDtype | None = None,
) -> Ops:
    """Return the operators of a device.

    dtype        of activations and of KV: float32 or bfloat16 on a CPU; on a GPU the one that its compute capability
                 stores
    numerics     None: "exact" on a CPU, "fast" on a GPU, which supports nothing else
    cpu_weights  how a CPU holds quantized weights: "int4" as stored; "int8" in a byte each; "both" where int4 and int8
                 need different kernels; "dense" dequantized to `dtype`. None: dense for float32, as stored for
                 bfloat16. Unless dense, the vocabulary head is held in int8
    kv_dtype     "int8": one byte per number of KV, each vector rounded to 255 steps. None: the dtype of the activations

    Raises ValueError naming what the device cannot do.
    """
    device = _validate_device(device)
    if device.type == "cuda":
        return _gpu_ops(device, dtype, numerics, kv_dtype)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype: {dtype} is not computed on a CPU; expected float32 or bfloat16")
    native, reason = load_native_kernels()
    return CpuOps(dtype, numerics or "exact", cpu_weights, native, reason, kv_dtype)


def choose_dtype(device: torch.device | str, checkpoint_dtype: torch.dtype) -> tuple[torch.dtype, str]:
    """Return the activation dtype that `dtype="auto"` means on a device, and the reason."""
    device = _validate_device(device)
    if device.type == "cuda":
        policy = policy_of(*torch.cuda.get_device_capability(device))
        return TORCH_DTYPES[policy.storage], f"compute capability {policy.capability}: {policy.reasons['storage']}"
    if checkpoint_dtype == torch.float32:
        return torch.float32, "the checkpoint is fp32"
    if has_bf16_arithmetic():
        return torch.bfloat16, "this CPU multiplies bf16 (AVX512-BF16 or AMX)"
    if load_native_kernels()[0]:
        return torch.bfloat16, "the C kernels take bf16 on any CPU"
    return torch.float32, "this CPU has no bf16 arithmetic, and there are no C kernels"


def _validate_device(device: torch.device | str) -> torch.device:
    """Return the device with its index. Raises ValueError if it does not exist here or has no operators."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: {device} has no operators; expected cpu or cuda[:i]")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        here = f"there are {count} CUDA devices" if count else "there is no CUDA device that torch can use"
        raise ValueError(f"device: {device}: {here}; motley doctor tells why")
    return torch.device("cuda", device.index or 0)


def _gpu_ops(device: torch.device, dtype: torch.dtype, numerics: Numerics | None, kv_dtype: KvDtype | None) -> Ops:
    from .device.device_context import gpu_context
    from .gpu.gpu_ops import GpuOps  # imports Triton

    if numerics == "exact":
        raise ValueError("numerics: exact is not computed on a GPU, whose kernels change with the batch; expected fast")
    ops = GpuOps(gpu_context(device), kv_dtype)
    if dtype != ops.dtype:
        name = str(ops.dtype).removeprefix("torch.")
        raise ValueError(f"dtype: {dtype} is not what {device} computes in; expected {name} or auto")
    return ops


def has_bf16_arithmetic() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and torch.cpu._is_avx512_bf16_supported()
