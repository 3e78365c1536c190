"""Reference of every operator in plain fp32 torch; each fast kernel is tested against it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .canonical_weights import DenseWeight, Weight


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return y [M, N] = x [M, K] @ w.T + bias, computed in fp32, in the dtype of x."""
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
    """Return the attention [T, H, D] of one sequence: q [T, H, D] at `positions` [T] over k, v [L, KH, D].

    k and v are the whole context. A query at position p sees keys max(0, p - window + 1) .. p. Computed in fp32, or in
    fp64 if q is fp64.
    """
    groups, dtype = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    keys = k.to(dtype).repeat_interleave(groups, dim=1)
    values = v.to(dtype).repeat_interleave(groups, dim=1)
    scores = torch.einsum("thd,lhd->htl", q.to(dtype) * scale, keys)
    scores = scores.masked_fill(~visible(positions, k.shape[0], window), float("-inf"))
    return torch.einsum("htl,lhd->thd", scores.softmax(dim=-1), values).to(q.dtype)


def visible(positions: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """Return bool [T, num_keys]: which keys (at positions 0 .. num_keys - 1) the query at each position sees."""
    keys = torch.arange(num_keys, device=positions.device)
    seen = keys <= positions[:, None]
    return seen if window is None else seen & (keys > positions[:, None] - window)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [..., N] normalised by the root mean square of its last dimension in fp32, times weight [N]."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rms_norm(x + residual) and x + residual, both in the shape of x."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [T, heads, D] with the halves of each head rotated by cos, sin [T, D / 2], in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [T, H, D] and k [T, KH, D] with the halves of each head rotated by cos, sin fp32 [T, D / 2]."""
    return rotate(q, cos, sin), rotate(k, cos, sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, I] of gate_up [T, 2 * I] = [gate | up], computed in fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
