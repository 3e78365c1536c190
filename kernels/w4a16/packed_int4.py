"""int4 weights packed as the GPU kernels read them.

K is cut into tiles of 128 columns, 16 int32 words per row, and the words of a tile are contiguous over all rows, so
that a block of rows reads one stretch of memory:

    words [K // 128, N, 16]

The eight nibbles of a word belong to columns 16 apart: nibble j of word i is column 16 * j + i of the tile. One shift
of a vector of words gives neighbouring columns, whose activations are one contiguous load, and no word's nibble mixes
groups of 32, 64 or 128 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..canonical_weights import GroupedWeight, concat_parts
from ..layer_memory import LayerMemory, total_nbytes

TILE = 128  # columns per tile
WORDS = 16  # int32 words per row of a tile
GROUP_SIZES = (32, 64, 128)  # all kernels are compiled for each of these, for every compute capability


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """Packed int4 weight w = scale * (code - zero); groups lie in the order of `permutation`, if there is one.

    words        int32 [K // 128, N, 16]
    scales       [K // group_size, N] in the checkpoint's own dtype
    zeros        int8 [K // group_size, N]: 0 to 16
    permutation  int64 [K] or None, as in GroupedWeight
    bias         [N] or None
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int
    permutation: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (N, K) of the weight before it was packed: outputs and inputs."""
        return self.words.shape[1], self.words.shape[0] * TILE

    @property
    def held(self) -> LayerMemory:
        return LayerMemory(total_nbytes(self.words, self.bias), total_nbytes(self.scales, self.zeros, self.permutation))


def pack_int4(weight: GroupedWeight) -> PackedInt4:
    """Pack a weight; groups above 128 columns repeat their scale.

    Raises ValueError for shapes that do not fit the tiles.
    """
    num_rows, num_columns = weight.shape
    if weight.bits != 4 or num_columns % TILE:
        raise ValueError(
            f"{weight.bits} bits and {num_columns} input features are not accepted; "
            f"expected 4 bits and a multiple of {TILE}"
        )
    repeats = max(1, weight.group_size // TILE)
    group = weight.group_size // repeats
    if group not in GROUP_SIZES or group * repeats != weight.group_size:
        raise ValueError(
            f"group_size: {weight.group_size} is not accepted; expected one of {GROUP_SIZES}, or a multiple of {TILE}"
        )
    tiles = weight.codes.view(num_rows, num_columns // TILE, 8, WORDS)
    words = torch.zeros((num_rows, num_columns // TILE, WORDS), dtype=torch.int32, device=tiles.device)
    for nibble in range(0 if words.is_meta else 8):  # on the meta device by shapes alone: see `center_codes`
        words |= tiles[:, :, nibble].to(torch.int32) << (4 * nibble)
    scales = weight.scales.repeat_interleave(repeats, dim=1).T.contiguous()
    zeros = weight.zeros.to(torch.int8).repeat_interleave(repeats, dim=1).T.contiguous()
    packed = words.transpose(0, 1).contiguous()
    return PackedInt4(packed, scales, zeros, group, weight.permutation, weight.bias)


def check_row_multiple(weight: PackedInt4) -> PackedInt4:
    """Return the weight unchanged. Raises ValueError unless N is a multiple of 16.

    Kernels are compiled ahead of time for such N only.
    """
    if weight.shape[0] % 16:
        raise ValueError(f"{weight.shape[0]} output features are not a multiple of 16, as the int4 kernels need")
    return weight


def unpack_int4(weight: PackedInt4) -> torch.Tensor:
    """Return the weight in fp64 [N, K] as a reference; its columns are in the order in which `words` holds them."""
    shifts = torch.arange(0, 32, 4, device=weight.words.device).view(1, 1, 8, 1)
    codes = (weight.words[:, :, None] >> shifts) & 15  # [K // 128, N, 8, 16]
    num_rows, num_columns = weight.shape
    codes = codes.transpose(0, 1).reshape(num_rows, num_columns)
    scales, zeros = (
        part.double().T.repeat_interleave(weight.group_size, dim=1) for part in (weight.scales, weight.zeros)
    )
    return scales * (codes - zeros)


def fuse_weights(weights: Sequence[PackedInt4]) -> PackedInt4:
    """Join several weights of the same input into one, rows after each other: Q, K and V, or gate and up.

    Raises ValueError where groups or permutations differ, or only some have a bias.
    """
    first = weights[0]
    for other in weights[1:]:
        if other.group_size != first.group_size or other.shape[1] != first.shape[1]:
            raise ValueError("weights that are fused must have the same K and group size")
        if not _equal(other.permutation, first.permutation):
            raise ValueError("weights that are fused must have the same permutation")
        if (other.bias is None) != (first.bias is None):
            raise ValueError("of weights that are fused, all must have a bias, or none")
    return PackedInt4(
        concat_parts([weight.words for weight in weights], dim=1),
        concat_parts([weight.scales for weight in weights], dim=1),
        concat_parts([weight.zeros for weight in weights], dim=1),
        first.group_size,
        first.permutation,
        None if first.bias is None else concat_parts([weight.bias for weight in weights if weight.bias is not None]),
    )


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
