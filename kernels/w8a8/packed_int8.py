"""int8 weights packed as the kernels of int8_product.py read them: in rows for tensor cores, in panels for dp4a."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..canonical_weights import GroupedWeight, center_codes
from .quantize_panels import PANEL
from .tensor_core_gemm import PackedRows8

GROUP_SIZES = (32, 128)  # all kernels are compiled for each of these, for every compute capability
MAX_COLUMNS = 65_536  # so that 127 * 255 * K is below 2**31


@dataclass(frozen=True, slots=True)
class PanelsInt8:
    """Weight w = scale * (code - zero) in panels of 128 rows; rows beyond N are zeros.

    words     int32 [panels, K / 4, 128]: byte i of [p, j, r] is column 4 * j + i of row 128 * p + r
    scales    [groups of K, 128 * panels], as stored in the checkpoint
    zeros     int8 [groups of K, 128 * panels], or None
    num_rows  N
    group     columns per group; 0 where all of K is one group
    bias      [N] or None
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    num_rows: int
    group: int = 0
    bias: torch.Tensor | None = None


def pack_rows(weight: GroupedWeight) -> PackedRows8:
    """Pack a weight in rows, for tensor cores. Raises ValueError for the same weights as `pack_panels`."""
    codes, scales, zeros, group = _signed(weight)
    return PackedRows8(codes, scales, zeros, group, bias=weight.bias)


def pack_panels(weight: GroupedWeight) -> PanelsInt8:
    """Pack a weight in panels, for dp4a. Columns are in the order of the groups.

    Groups of a multiple of 128 or 32 columns repeat their scale. Raises ValueError for other than 8 bits, and for a
    group or a K that the kernels do not support.
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
    """Return codes and zeros minus 128, which keeps their difference, with scales and zeros [groups, N], and the group.

    Zeros are None if all are 0, which cannot be known of a meta tensor. With groups they are always returned: kernels
    for groups without zeros would spill registers on some capabilities.
    """
    num_columns = weight.shape[1]
    if weight.bits != 8 or num_columns % 16 or num_columns > MAX_COLUMNS:
        raise ValueError(
            f"{weight.bits} bits and {num_columns} input features are not accepted; "
            f"expected 8 bits and a multiple of 16 up to {MAX_COLUMNS}"
        )
    group, repeats = weight.group_size, 1
    if group == num_columns:
        group = 0
    else:
        group = next((size for size in reversed(GROUP_SIZES) if weight.group_size % size == 0), 0)
        if not group:
            raise ValueError(
                f"group_size: {weight.group_size} is not accepted; expected K, or a multiple of {GROUP_SIZES[0]}"
            )
        repeats = weight.group_size // group
    codes = center_codes(weight.codes)
    zeros = center_codes(weight.zeros).repeat_interleave(repeats, dim=1).T.contiguous()
    scales = weight.scales.repeat_interleave(repeats, dim=1).T.contiguous()
    return codes, scales, zeros if zeros.is_meta or group or bool(zeros.any()) else None, group
