"""Weights in canonical form: every checkpoint format produces this form, and every kernel can repack it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FP8_BLOCK = 128  # rows and columns that share a scale
SCALES = "fp16"  # dtype of the scales in GPTQ and AWQ checkpoints, whatever the activations' dtype; kernels take any


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Unquantized weight of a linear layer: `weight` [N, K] in floating point, and `bias` [N] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Integer weight with one scale and zero point per group: w = scales * (codes - zeros).

    w[n, k] = scales[n, k // group_size] * (codes[n, k] - zeros[n, k // group_size])

    codes        uint8 [N, K], below 2**bits
    scales       floating point [N, K // group_size], as stored in the checkpoint
    zeros        uint8 [N, K // group_size], from 0 to 2**bits inclusive
    bits         4 or 8
    permutation  int64 [K] or None: column k of `codes` belongs to input feature permutation[k] (GPTQ's desc_act, sorted
                 so that groups lie together); y = x[:, permutation] @ w.T + bias
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
        """Return the dequantized weight [N, K], columns in the order of the input features, as kernels' reference."""
        if self.codes.is_meta:  # a meta tensor: only the shape counts, see `center_codes`
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
    """FP8 weight with one scale per tensor, per row or per block of 128 by 128: w[n, k] = scale * codes[n, k].

    codes   e4m3 [N, K]
    scales  floating point: [1, 1] per tensor; [N, 1] per row; or [ceil(N / 128), ceil(K / 128)] per block
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
        """Return the dequantized weight [N, K] as a reference, computed in fp32 (in fp64 if `dtype` is fp64) and
        rounded once.
        """
        if self.codes.is_meta:  # a meta tensor: only the shape counts, see `center_codes`
            return self.codes.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        scales = self.scales.to(wide)
        if self.in_blocks:
            num_rows, num_columns = self.shape
            scales = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:num_rows, :num_columns]
        return (self.codes.to(wide) * scales).to(dtype)


def num_scale_blocks(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Shape of the scales of an fp8 weight [N, K] that has one scale per block of 128 by 128."""
    return -(-num_rows // FP8_BLOCK), -(-num_columns // FP8_BLOCK)


Weight = DenseWeight | GroupedWeight | Fp8Weight


def center_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return uint8 codes minus 128 as int8.

    For a tensor on the meta device only the shape is computed: for arithmetic on that device torch imports its
    compiler, which takes a second.
    """
    return codes.view(torch.int8) if codes.is_meta else (codes.to(torch.int16) - 128).to(torch.int8)


def concat_parts(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate tensors as torch.cat does; on the meta device by shapes alone, for the reason in `center_codes`."""
    if not parts[0].is_meta:
        return torch.cat([*parts], dim)
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


def is_meta_weight(weight: Weight) -> bool:
    """Return whether the weight has shapes and dtypes but no values: whether its tensors are on the meta device."""
    return weight.weight.is_meta if isinstance(weight, DenseWeight) else weight.codes.is_meta
