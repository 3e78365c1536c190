"""Writing GPTQ checkpoints: the algorithm, its round-to-nearest baseline, and packing.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) rounds a linear layer's weight one input column at a time. After
each column it moves the rounding error onto the columns still to come, along the inverse Hessian of the
layer's squared output error, so that they make up for it. Shapes: a weight is [N, K] = [out, in] features,
as in ``nn.Linear``; G groups of ``group_size`` neighbouring columns share one scale and zero point per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

BLOCK_COLUMNS = 128  # most columns that are rounded before the rest is updated; a group may have fewer
SHRINK_STEPS = 20  # candidate ranges per group, from the full range down to SHRINK_TO of it
SHRINK_TO = 0.75


@dataclass(frozen=True)
class GPTQSettings:
    """Settings of GPTQ; ``group_size`` -1 makes one group of the whole row."""

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    desc_act: bool = False
    damping: float = 0.01  # added to the Hessian's diagonal, as a share of its mean
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}; GPTQ is written with 4 or 8")
        if self.group_size != -1 and self.group_size not in (32, 64, 128):
            raise ValueError(f"group_size is {self.group_size}; accepted: -1, 32, 64, 128")
        if self.checkpoint_format not in ("gptq", "gptq_v2"):
            raise ValueError(f"checkpoint_format is {self.checkpoint_format!r}; accepted: 'gptq', 'gptq_v2'")
        if not self.damping > 0:
            raise ValueError(f"damping is {self.damping}; the factorization needs it above 0")

    @property
    def max_code(self) -> int:
        """Largest code of a quantized weight, 15 or 255."""
        return (1 << self.bits) - 1

    @property
    def zero_offset(self) -> int:
        """Number that is subtracted from a zero point before it is stored: 1 in v1, 0 in v2.

        It is also the least zero point used: v1 readers differ on whether a stored -1 comes back as 0 or 16.
        """
        return 1 if self.checkpoint_format == "gptq" else 0

    def group_columns(self, columns: int) -> int:
        """Return the columns per group for K ``columns``; raises ValueError where the groups do not divide K."""
        size = columns if self.group_size == -1 else self.group_size
        if columns % size:
            raise ValueError(f"K = {columns} is not a multiple of group_size {size}")
        return size

    def describe(self) -> dict[str, Any]:
        """Return the ``quantization_config`` of a Hugging Face ``config.json``."""
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "sym": self.sym,
            "desc_act": self.desc_act,
            "damp_percent": self.damping,
            "static_groups": False,
            "true_sequential": True,
            "lm_head": False,
            "checkpoint_format": self.checkpoint_format,
        }


@dataclass(frozen=True)
class GptqCodes:
    """Integer codes of one weight, unpacked.

    codes int32 [K, N] in 0..max_code, scales fp16 [G, N], zeros int32 [G, N], g_idx int32 [K], the group of
    each column.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor

    def dequantize(self) -> Tensor:
        """Return the weight, fp32 [N, K]: (code - zero) * scale."""
        group = self.g_idx.long()
        return ((self.codes - self.zeros[group]) * self.scales[group].float()).T.contiguous()


@dataclass(frozen=True)
class RoundingGrid:
    """Rounding grid of one group: scale fp32 [N] (exactly representable in fp16), zero fp32 [N], integral."""

    scale: Tensor
    zero: Tensor
    max_code: int

    def encode(self, values: Tensor) -> Tensor:
        """Return the codes of the nearest grid points, fp32 [N, C], for values fp32 [N, C]."""
        codes = torch.round(values / self.scale[:, None]) + self.zero[:, None]
        return codes.clamp_(0, self.max_code)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values, fp32 [N, C], of codes fp32 [N, C] on the grid."""
        return (codes - self.zero[:, None]) * self.scale[:, None]


def fit_grid(values: Tensor, settings: GPTQSettings, shrink: float = 1.0) -> RoundingGrid:
    """Return the grid over ``shrink`` times the range of fp32 [N, C] values; zero itself is always on the grid."""
    low = values.amin(1).clamp(max=0) * shrink
    high = values.amax(1).clamp(min=0) * shrink
    if settings.sym:
        high = torch.maximum(high, -low)
        low = -high
    # Scales are stored in fp16: rounding them here lets the error feedback see the value a reader will use.
    scale = ((high - low) / settings.max_code).half().float()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    if settings.sym:
        return RoundingGrid(scale, torch.full_like(scale, (settings.max_code + 1) // 2), settings.max_code)
    zero = torch.round(-low / scale).clamp(settings.zero_offset, settings.max_code)
    return RoundingGrid(scale, zero, settings.max_code)


def best_grid(values: Tensor, settings: GPTQSettings) -> RoundingGrid:
    """Return for each row the grid among SHRINK_STEPS ranges with the least squared error on fp32 [N, C] values.

    Clipping the largest weights a little pays at 4 bits, where a finer step helps all the others.
    """
    best = fit_grid(values, settings)
    min_error = (best.decode(best.encode(values)) - values).square().sum(1)
    for step in range(1, SHRINK_STEPS + 1):
        grid = fit_grid(values, settings, 1 - (1 - SHRINK_TO) * step / SHRINK_STEPS)
        error = (grid.decode(grid.encode(values)) - values).square().sum(1)
        better = error < min_error
        min_error = torch.where(better, error, min_error)
        scale = torch.where(better, grid.scale, best.scale)
        best = RoundingGrid(scale, torch.where(better, grid.zero, best.zero), settings.max_code)
    return best


@dataclass
class Hessian:
    """Running mean of x xᵀ over a layer's inputs: the Hessian of its squared output error, up to a factor."""

    columns: int
    rows: int = 0
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.total = torch.zeros(self.columns, self.columns)

    def add(self, inputs: Tensor) -> None:
        """Add the activations [..., K] of a batch to the mean of x xᵀ."""
        flat = inputs.detach().reshape(-1, self.columns).float()
        self.total += flat.T @ flat
        self.rows += len(flat)

    def mean(self) -> Tensor:
        """Return the mean of x xᵀ, fp32 [K, K]; raises ValueError before any input was seen."""
        if not self.rows:
            raise ValueError("no calibration input reached this layer")
        return self.total / self.rows


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor U of the damped inverse Hessian, H⁻¹ = Uᵀ U; fp32 [K, K] for fp32 [K, K].

    Row i of U holds all that the algorithm needs once columns before i are fixed (section 3.3 of the paper).
    """
    h = hessian.double()
    h += damping * h.diagonal().mean().clamp(min=1e-12) * torch.eye(len(h), dtype=h.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.float()


def quantize_gptq(weight: Tensor, hessian: Tensor, settings: GPTQSettings) -> GptqCodes:
    """Quantize one weight [N, K] given its inputs' Hessian fp32 [K, K].

    With ``desc_act`` the columns with the largest activations go first, while most columns are still free to
    make up for their error; groups then follow that order and ``g_idx`` says which is which.
    """
    rows, columns = weight.shape
    size = settings.group_columns(columns)
    diagonal, order = hessian.diagonal(), torch.arange(columns)
    if settings.desc_act:
        order = torch.argsort(diagonal, descending=True, stable=True)
    work = weight.detach().float()[:, order].clone()
    work[:, diagonal[order] == 0] = 0.0  # inputs that never fire: any weight will do, and 0 costs no range
    factor = inverse_factor(hessian[order][:, order], settings.damping)
    codes = torch.empty(rows, columns)
    grids: list[RoundingGrid] = []
    # A block never crosses a group, so that a group's grid is fitted to columns that have had all updates.
    block = min(size, BLOCK_COLUMNS)
    for start in range(0, columns, block):
        end = min(start + block, columns)
        if start % size == 0:
            grids.append(best_grid(work[:, start : start + size], settings))
        codes[:, start:end], error = round_block(work[:, start:end], factor[start:end, start:end], grids[-1])
        work[:, end:] -= error @ factor[start:end, end:]
    return restore_column_order(codes, grids, order, size)


def round_block(values: Tensor, factor: Tensor, grid: RoundingGrid) -> tuple[Tensor, Tensor]:
    """Round fp32 [N, C] columns left to right; returns codes and scaled errors, both fp32 [N, C]."""
    values = values.clone()
    codes, error = torch.empty_like(values), torch.empty_like(values)
    for i in range(values.shape[1]):
        codes[:, i : i + 1] = grid.encode(values[:, i : i + 1])
        rounded = grid.decode(codes[:, i : i + 1])[:, 0]
        error[:, i] = (values[:, i] - rounded) / factor[i, i]
        values[:, i + 1 :] -= error[:, i : i + 1] * factor[i, i + 1 :]
    return codes, error


def round_to_nearest(weight: Tensor, settings: GPTQSettings) -> GptqCodes:
    """Round each weight [N, K] to its nearest code on the same kind of grid: the baseline without calibration."""
    columns = weight.shape[1]
    size = settings.group_columns(columns)
    parts = torch.split(weight.detach().float(), size, dim=1)
    grids = [best_grid(part, settings) for part in parts]
    codes = torch.cat([grid.encode(part) for grid, part in zip(grids, parts, strict=True)], dim=1)
    return restore_column_order(codes, grids, torch.arange(columns), size)


def restore_column_order(codes: Tensor, grids: Sequence[RoundingGrid], order: Tensor, size: int) -> GptqCodes:
    """Return codes fp32 [N, K] in working ``order`` as a `GptqCodes` in the layer's own column order."""
    place = torch.argsort(order)
    return GptqCodes(
        codes=codes[:, place].T.to(torch.int32).contiguous(),
        scales=torch.stack([grid.scale for grid in grids]).half(),
        zeros=torch.stack([grid.zero for grid in grids]).to(torch.int32),
        g_idx=(place // size).to(torch.int32),
    )


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """Pack non-negative integers [R, C] below 2**bits into int32 [R * bits / 32, C], the first row in the lowest
    bits.
    """
    per_word = 32 // bits
    if len(values) % per_word:
        raise ValueError(f"{len(values)} rows do not fill whole 32-bit words of {per_word}")
    lanes = values.to(torch.int64).reshape(-1, per_word, values.shape[1])
    shifts = torch.arange(0, 32, bits)[None, :, None]
    packed = (lanes << shifts).sum(1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def unpack_rows(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [R * bits / 32, C] to int32 [R, C]: the inverse of :func:`pack_rows`."""
    shifts = torch.arange(0, 32, bits)[None, :, None]
    lanes: Tensor = (packed.to(torch.int64)[:, None, :] >> shifts) & ((1 << bits) - 1)
    return lanes.reshape(-1, packed.shape[1]).to(torch.int32)


def pack_checkpoint(quantized: GptqCodes, settings: GPTQSettings) -> dict[str, Tensor]:
    """Return a weight's checkpoint tensors, with P = 32 / bits values to a word.

    qweight int32 [K/P, N], qzeros int32 [G, N/P] (zero - 1 in v1, zero itself in v2), scales fp16 [G, N], g_idx int32
    [K]. Raises ValueError where K or N is not a multiple of P.
    """
    zeros = quantized.zeros - settings.zero_offset
    return {
        "qweight": pack_rows(quantized.codes, settings.bits).contiguous(),
        "qzeros": pack_rows(zeros.T, settings.bits).T.contiguous(),
        "scales": quantized.scales.contiguous(),
        "g_idx": quantized.g_idx.contiguous(),
    }


def unpack_checkpoint(tensors: dict[str, Tensor], settings: GPTQSettings) -> GptqCodes:
    """Return the `GptqCodes` weight of checkpoint tensors: the inverse of :func:`pack_checkpoint`."""
    zeros = unpack_rows(tensors["qzeros"].T, settings.bits).T + settings.zero_offset
    codes = unpack_rows(tensors["qweight"], settings.bits)
    return GptqCodes(codes, tensors["scales"], zeros.contiguous(), tensors["g_idx"])
