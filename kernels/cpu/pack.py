"""Weights rearranged for the CPU kernels, and rounded to int8 where a kernel wants that."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..weights import DenseWeight, Fp8Weight, GroupedWeight, Weight, is_outline

LANES = 16
STRIP = 64
STRIP_METADATA = STRIP * 5  # bytes of a group's scales, fp32, and zero points in a strip
_ROWS_AT_ONCE = 1024  # of a weight, where all of it in fp32 would be too much
_GROUPS = (128, 64, 32, 16)  # what long groups are cut into, best first: x is rounded per group


def group_for(num_inputs: int, group_size: int) -> int | None:
    """The group in which the C kernel can take weights of this group size; None if there is none."""
    if group_size % LANES == 0 and group_size <= 256:
        return group_size
    if group_size != num_inputs:
        return None
    return next((group for group in _GROUPS if num_inputs % group == 0), None)


def regroup(weight: GroupedWeight, group: int) -> GroupedWeight:
    """The same weights with every group's scale and zero point repeated for pieces of `group` inputs."""
    times = weight.group_size // group
    return GroupedWeight(
        weight.codes,
        weight.scales.repeat_interleave(times, dim=1),
        weight.zeros.repeat_interleave(times, dim=1),
        weight.bits,
        group,
        weight.permutation,
        weight.bias,
    )


def interleave(weight: GroupedWeight, bits: int) -> torch.Tensor:
    """uint8 [strips, groups, bytes] as csrc/linear.c lays it out: scales, zero points and codes of 64 outputs."""
    strips = -(-weight.shape[0] // STRIP)
    groups = weight.shape[1] // weight.group_size
    codes, scales, zeros = (_pad_rows(t, strips * STRIP) for t in (weight.codes, weight.scales.float(), weight.zeros))
    if bits == 4:
        pairs = codes.view(strips, STRIP, groups, -1, 2, 4)
        codes = pairs[:, :, :, :, 0] | pairs[:, :, :, :, 1] << 4
    else:
        codes = codes.view(strips, STRIP, groups, -1, 4)
    scales, zeros = (t.view(strips, STRIP, groups).transpose(1, 2).contiguous() for t in (scales, zeros))
    stream = codes.permute(0, 2, 3, 1, 4).reshape(strips, groups, -1)
    return torch.cat((scales.view(torch.uint8), zeros, stream), dim=2)


def interleave_dense(weight: torch.Tensor) -> torch.Tensor:
    """fp32 [blocks, K, 16] or bf16 [blocks, K / 2, 16, 2] as csrc/dense.c lays it out."""
    blocks, together = -(-weight.shape[0] // LANES), 1 if weight.dtype == torch.float32 else 2
    padded = F.pad(weight, (0, -weight.shape[1] % together, 0, blocks * LANES - weight.shape[0]))
    return padded.view(blocks, LANES, -1, together).transpose(1, 2).contiguous()


def round_to_int8(weight: Weight, group: int) -> tuple[GroupedWeight, float]:
    """Symmetric int8 in groups along the inputs (scale = largest magnitude / 127, zero point 128), and the error.

    The error is what rounding changed, relative to a typical weight of the same output, as a root mean square over
    the outputs. Typical: mean magnitude times 1.2533, the standard deviation were they Gaussian; a root mean
    square would let a few large weights hide what became of the others. Of an outline it is taken to be 0.
    """
    num_outputs, num_inputs = weight.shape
    device = "meta" if is_outline(weight) else "cpu"
    codes = torch.empty(num_outputs, num_inputs, dtype=torch.uint8, device=device)
    scales = torch.empty(num_outputs, num_inputs // group, device=device)
    zeros = torch.full_like(scales, 128, dtype=torch.uint8)
    rounded = GroupedWeight(codes, scales, zeros, bits=8, group_size=group, bias=weight.bias)
    if is_outline(weight):
        return rounded, 0.0
    squares = 0.0
    for start in range(0, num_outputs, _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, num_outputs))
        before = dequantized(_rows(weight, rows))
        pieces = before.view(len(before), -1, group)
        scales[rows] = pieces.abs().amax(dim=2) / 127
        scale = torch.where(scales[rows] > 0, scales[rows], 1.0)[:, :, None]
        nearest = (pieces / scale).round_()
        codes[rows] = (nearest + 128).to(torch.uint8).view_as(before)
        changed = nearest.mul_(scale).sub_(pieces).square_().mean(dim=(1, 2))
        typical = (before.abs().mean(dim=1) * 1.2533).square_()
        squares += (changed / typical).nan_to_num_(nan=0.0).sum().item()  # an output of zeros is unchanged
    return rounded, math.sqrt(squares / num_outputs)


def dequantized(weight: Weight) -> torch.Tensor:
    """fp32 [N, K]; may share memory with the weight."""
    return weight.weight.float() if isinstance(weight, DenseWeight) else weight.dequantize()


def dequantized_rows(weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    """fp32 [len(rows), K] of these outputs."""
    return dequantized(_rows(weight, rows))


def _rows(weight: Weight, rows: slice | torch.Tensor) -> Weight:
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.weight[rows])
    if isinstance(weight, Fp8Weight):
        return DenseWeight(weight.dequantize()[rows])
    tensors = (weight.codes[rows], weight.scales[rows], weight.zeros[rows])
    return GroupedWeight(*tensors, weight.bits, weight.group_size, weight.permutation)


def _pad_rows(t: torch.Tensor, rows: int) -> torch.Tensor:
    return F.pad(t, (0, 0, 0, rows - t.shape[0]))
