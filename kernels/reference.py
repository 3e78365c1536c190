"""The plain meaning of every operator, in fp32 torch: what each fast kernel is tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .canonical_weights import DenseWeight, Weight


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """y [M, N] = x [M, K] @ w.T + bias, computed in fp32, in the dtype of x."""
    dense = weight.weight.float() if isinstance(weight, DenseWeight) else weight.dequantize()
    bias = None if weight.bias is None else weight.bias.float()
    return F.linear(x.float(), dense, bias).to(x.dtype)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """One sequence: q [T, H, D] at `positions` [T] over its whole context k, v [L, KH, D]; returns [T, H, D].

    A query at position p sees keys max(0, p - window + 1) .. p. In fp64 if q is.
    """
    groups, dtype = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    keys = k.to(dtype).repeat_interleave(groups, dim=1)
    values = v.to(dtype).repeat_interleave(groups, dim=1)
    scores = torch.einsum("thd,lhd->htl", q.to(dtype) * scale, keys)
    scores = scores.masked_fill(~visible(positions, k.shape[0], window), float("-inf"))
    return torch.einsum("htl,lhd->thd", scores.softmax(dim=-1), values).to(q.dtype)


def visible(positions: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """bool [T, num_keys]: which keys (at positions 0 .. num_keys - 1) a query at each position sees."""
    keys = torch.arange(num_keys, device=positions.device)
    seen = keys <= positions[:, None]
    return seen if window is None else seen & (keys > positions[:, None] - window)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., N] normalised over its last dimension in fp32, times weight [N]."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate halves of x [T, heads, D] by cos, sin [T, D / 2], in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D] and k [T, KH, D] rotated; cos, sin fp32 [T, D / 2]."""
    return rotate(q, cos, sin), rotate(k, cos, sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2 * I] = [gate | up], in fp32; returns [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
