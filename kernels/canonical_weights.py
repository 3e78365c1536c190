"""Weights in canonical form: what a checkpoint format hands out and every kernel can repack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FP8_BLOCK = 128  # rows and columns that share a scale
SCALES = "fp16"  # what GPTQ and AWQ checkpoints have, whatever activations are in; kernels take any


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """weight [N, K] floating point; bias [N] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Affine integer weights: w[n, k] = scales[n, k // group] * (codes[n, k] - zeros[n, k // group]).

    codes        uint8 [N, K], below 2**bits
    scales       floating point [N, K // group_size], as stored
    zeros        uint8 [N, K // group_size]; up to 2**bits inclusive
    bits         4 or 8
    permutation  int64 [K] or None: column k of `codes` belongs to input feature permutation[k] (GPTQ's
                 desc_act, sorted so that groups lie together); y = x[:, permutation] @ w.T + bias
    bias         [N] or None
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int
    group_size: int
    permutation: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Reference: [N, K] in the order of the input features."""
        if self.codes.is_meta:  # of an outline by shapes: see `center_codes`
            return self.codes.to(dtype)
        scales = self.scales.float().repeat_interleave(self.group_size, dim=1)
        zeros = self.zeros.float().repeat_interleave(self.group_size, dim=1)
        dense = scales * (self.codes.float() - zeros)
        if self.permutation is not None:
            restored = torch.empty_like(dense)
            restored[:, self.permutation] = dense
            dense = restored
        return dense.to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """w[n, k] = scale * codes[n, k].

    codes   e4m3 [N, K]
    scales  floating point: [1, 1], of all; [N, 1], of a row; or [ceil(N / 128), ceil(K / 128)], of a block
    bias    [N] or None
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def in_blocks(self) -> bool:
        blocks = num_scale_blocks(*self.shape)
        return tuple(self.scales.shape) == blocks and blocks != (1, 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Reference: [N, K]; formed in fp32, or in fp64 if that is asked for, and rounded once."""
        if self.codes.is_meta:  # of an outline by shapes: see `center_codes`
            return self.codes.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        scales = self.scales.to(wide)
        if self.in_blocks:
            num_rows, num_columns = self.shape
            scales = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:num_rows, :num_columns]
        return (self.codes.to(wide) * scales).to(dtype)


def num_scale_blocks(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Scales of an fp8 weight [N, K] in blocks."""
    return -(-num_rows // FP8_BLOCK), -(-num_columns // FP8_BLOCK)


Weight = DenseWeight | GroupedWeight | Fp8Weight


def center_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 less 128, in int8. Of an outline by shapes: for arithmetic on the meta device torch imports its compiler,
    which takes a second.
    """
    return codes.view(torch.int8) if codes.is_meta else (codes.to(torch.int16) - 128).to(torch.int8)


def concat_parts(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """torch.cat; of an outline likewise by shapes."""
    if not parts[0].is_meta:
        return torch.cat([*parts], dim)
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


def is_meta_weight(weight: Weight) -> bool:
    """Whether it has shapes and types alone, and no values: its tensors are on the meta device."""
    return weight.weight.is_meta if isinstance(weight, DenseWeight) else weight.codes.is_meta
