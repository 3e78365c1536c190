"""Which operators an engine computes with: by its device, its dtype and its numerics."""

from __future__ import annotations

import torch

from ...kernels.contract import MetaOpsProvider
from ...kernels.ops import Ops, choose_dtype, ops_for_device
from ..engine_config import EngineConfig
from ..errors import InvalidRequest


def choose_operators(config: EngineConfig, stored: torch.dtype) -> tuple[Ops, str]:
    """Return the operators, and why they compute in their dtype. Raises InvalidRequest for what the device cannot
    do.
    """
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise InvalidRequest(f"device: {config.device!r} is none; expected cpu or cuda[:i]", param="device") from error
    try:
        dtype, why = _dtype(config.dtype, device, stored)
        ops = ops_for_device(
            device, dtype, numerics=config.numerics, cpu_weights=config.cpu_weights, kv_dtype=config.kv_dtype
        )
        return ops, why
    except ValueError as error:
        raise InvalidRequest(str(error), param=str(error).partition(":")[0]) from error


def choose_meta_operators(config: EngineConfig, stored: torch.dtype, ops: Ops) -> Ops:
    """Return separate operators of the same device for an outline of the model, so that what they choose is not
    recorded in the choices of `ops`.
    """
    return ops.for_meta_device() if isinstance(ops, MetaOpsProvider) else choose_operators(config, stored)[0]


def _dtype(requested: str, device: torch.device, stored: torch.dtype) -> tuple[torch.dtype, str]:
    if requested == "auto":
        return choose_dtype(device, stored)
    return getattr(torch, requested), f"{requested}: as configured"
