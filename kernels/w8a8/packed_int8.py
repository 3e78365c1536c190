"""int8 weights as the kernels of int8.py read them: rows for tensor cores, panels for dp4a."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..canonical_weights import GroupedWeight, center_codes
from .quantize_panels import PANEL
from .tensor_core_gemm import PackedRows8

__all__ = ["GROUP_SIZES", "PanelsInt8", "pack_panels", "pack_rows"]

GROUP_SIZES = (32, 128)  # of each, all kernels are compiled for every capability
MAX_COLUMNS = 65_536  # 127 * 255 * K is below 2**31


@dataclass(frozen=True, slots=True)
class PanelsInt8:
    """w = scale * (code - zero), in panels of 128 rows; rows beyond N are zeros.

    words     int32 [panels, K / 4, 128]: byte i of [p, j, r] is column 4 * j + i of row 128 * p + r
    scales    [groups of K, 128 * panels], as stored
    zeros     int8, likewise, or None
    num_rows  N
    group     columns; 0 where all of K is one
    bias      [N] or None
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    num_rows: int
    group: int = 0
    bias: torch.Tensor | None = None


def pack_rows(weight: GroupedWeight) -> PackedRows8:
    """For tensor cores. Raises ValueError as `pack_panels`."""
    codes, scales, zeros, group = _signed(weight)
    return PackedRows8(codes, scales, zeros, group, bias=weight.bias)


def pack_panels(weight: GroupedWeight) -> PanelsInt8:
    """For dp4a. Columns in order of the groups; groups of multiples of 128 or 32 columns repeat their scale.

    Raises ValueError for other than 8 bits, and for a group or a K that the kernels do not have.
    """
    codes, scales, zeros, group = _signed(weight)
    num_rows, num_columns = codes.shape
    missing = -num_rows % PANEL
    codes = torch.nn.functional.pad(codes, (0, 0, 0, missing)).contiguous()
    words = codes.view(torch.int32).view(-1, PANEL, num_columns // 4).transpose(1, 2).contiguous()
    scales = torch.nn.functional.pad(scales, (0, missing))
    zeros = None if zeros is None else torch.nn.functional.pad(zeros, (0, missing))
    return PanelsInt8(words, scales, zeros, num_rows, group, weight.bias)


def _signed(weight: GroupedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """Codes and zeros less 128, which leaves their difference; scales and zeros [groups, N]; no zeros if all are 0.

    Of an outline they are not known to be. Groups always have them: kernels without spill on some capabilities.
    """
    num_columns = weight.shape[1]
    if weight.bits != 8 or num_columns % 16 or num_columns > MAX_COLUMNS:
        raise ValueError(
            f"int8 kernels take 8 bits and a K in sixteens up to {MAX_COLUMNS}, "
            f"not {weight.bits} bits and K {num_columns}"
        )
    group, repeats = weight.group_size, 1
    if group == num_columns:
        group = 0
    else:
        group = next((size for size in reversed(GROUP_SIZES) if weight.group_size % size == 0), 0)
        if not group:
            raise ValueError(f"group_size: {weight.group_size} is neither K nor a multiple of {GROUP_SIZES[0]}")
        repeats = weight.group_size // group
    codes = center_codes(weight.codes)
    zeros = center_codes(weight.zeros).repeat_interleave(repeats, dim=1).T.contiguous()
    scales = weight.scales.repeat_interleave(repeats, dim=1).T.contiguous()
    return codes, scales, zeros if zeros.is_meta or group or bool(zeros.any()) else None, group
