"""Packing of weights for the CPU kernels, and rounding to int8 where a kernel needs it.

It is done by csrc/pack.c where there is a compiler and the weight's kind is supported, else by torch's operators, with
the same result.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import overload

import torch
import torch.nn.functional as F

from ...canonical_weights import FP8_BLOCK, DenseWeight, Fp8Weight, GroupedWeight, Weight, is_meta_weight
from ..c_kernels.native_build import load_library
from ..memory import lazy_pages

TYPES = {torch.float32: 0, torch.bfloat16: 1}
LANES = 16
STRIP = 64
STRIP_METADATA = STRIP * 5  # bytes of a group's fp32 scales and zero points in a strip
_ROWS_AT_ONCE = 1024  # rows of a weight processed at once, where all of them in fp32 would take too much memory
_GROUPS = (128, 64, 32, 16)  # sizes into which long groups are cut, best first: x is rounded per group


def group_for(num_inputs: int, group_size: int) -> int | None:
    """Group size that the C kernel uses for weights of this group size; None if it supports none."""
    if group_size % LANES == 0 and group_size <= 256:
        return group_size
    if group_size != num_inputs:
        return None
    return next((group for group in _GROUPS if num_inputs % group == 0), None)


def regroup(weight: GroupedWeight, group: int) -> GroupedWeight:
    """Return the same weight with every group's scale and zero point repeated for pieces of `group` inputs."""
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
    """Return a weight in int4 or int8 with groups, in the layout of csrc/linear.c: uint8 [strips, groups, bytes].

    A strip has the scales, zero points and codes of 64 outputs.
    """
    num_outputs, num_inputs = weight.shape
    stream = _empty_stream(weight, num_outputs, num_inputs // weight.group_size, weight.group_size, bits)
    if stream.is_meta:  # for arithmetic on meta tensors torch would import its compiler
        return stream
    if (native := _native()) is not None:
        for rows in _blocks(num_outputs):
            native.lay_grouped(_rows(weight, rows), stream[rows.start // STRIP :], bits)
        return stream
    for rows in _blocks(num_outputs):
        _lay_rows(stream, rows, _rows(weight, rows), bits)
    return stream


def interleave_int8(weight: Weight, group: int) -> tuple[torch.Tensor, float]:
    """Return a weight rounded as by `round_to_int8`, in the layout of `interleave`, and the error.

    The rounded weight never exists as a whole in any other layout.
    """
    num_outputs, num_inputs = weight.shape
    stream = _empty_stream(weight, num_outputs, num_inputs // group, group, 8)
    if isinstance(weight, DenseWeight) and not stream.is_meta and (native := _native()) is not None:
        blocks = [(weight.weight[rows], stream[rows.start // STRIP :]) for rows in _blocks(num_outputs)]
        return stream, math.sqrt(sum(native.lay_int8(*block, group) for block in blocks) / num_outputs)
    return stream, _round_blocks(weight, group, lambda rows, block: _lay_rows(stream, rows, block, 8))


def interleave_dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in the layout of csrc/dense.c: fp32 [blocks, K, 16] or bf16 [blocks, K / 2, 16, 2]."""
    (num_outputs, num_inputs), together = weight.shape, 1 if dtype == torch.float32 else 2
    shape = (-(-num_outputs // LANES), -(-num_inputs // together), LANES, together)
    laid = _empty(weight, *shape, dtype=dtype)
    if laid.is_meta:
        return laid
    even = num_inputs % together == 0
    if isinstance(weight, DenseWeight) and weight.weight.dtype == dtype and even:
        native = _native()
        if native is not None:
            native.lay_words(weight.weight, laid)
            return laid
    for rows in _blocks(num_outputs):
        part = _rows(weight, rows)
        dense = _in_dtype(part, dtype)
        missing = -num_inputs % together, -len(dense) % LANES
        padded = F.pad(dense, (0, missing[0], 0, missing[1])) if any(missing) else dense.contiguous()
        # Moving four bytes at a time is about four times as fast as two.
        pieces = padded.view(torch.int32).view(-1, LANES, shape[1]).transpose(1, 2)
        laid.view(torch.int32).view(shape[:3])[rows.start // LANES :][: len(pieces)] = pieces
    return laid


class _NativePacker:
    """Packing by csrc/pack.c, with the same results as by torch; it rounds only dense weights to int8.

    It uses one thread, and lets other threads of Python run.
    """

    def __init__(self, lib: ctypes.CDLL) -> None:
        whole, at = ctypes.c_int64, ctypes.c_void_p
        self._words, self._int8, self._grouped = lib.motley_lay_words, lib.motley_lay_int8, lib.motley_lay_grouped
        self._words.argtypes, self._words.restype = (at, at, whole, whole), None
        self._int8.argtypes, self._int8.restype = (at, at, whole, whole, whole, ctypes.c_int), ctypes.c_double
        self._grouped.argtypes, self._grouped.restype = (*[at] * 4, *[whole] * 3, ctypes.c_int), None

    def lay_words(self, weight: torch.Tensor, laid: torch.Tensor) -> None:
        weight = weight.contiguous()
        rows, inputs = weight.shape
        self._words(weight.data_ptr(), laid.data_ptr(), rows, inputs * weight.itemsize // 4)

    def lay_int8(self, weight: torch.Tensor, stream: torch.Tensor, group: int) -> float:
        """Pack rows rounded to int8; return the rounding error relative to a typical weight, squared and summed over
        outputs.
        """
        weight = (weight if weight.dtype in TYPES else weight.float()).contiguous()
        squares: float = self._int8(weight.data_ptr(), stream.data_ptr(), *weight.shape, group, TYPES[weight.dtype])
        return squares

    def lay_grouped(self, weight: GroupedWeight, stream: torch.Tensor, bits: int) -> None:
        codes, scales, zeros = weight.codes.contiguous(), weight.scales.float().contiguous(), weight.zeros.contiguous()
        tensors = codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(), stream.data_ptr()
        self._grouped(*tensors, *weight.shape, weight.group_size, bits)


@functools.cache
def _native() -> _NativePacker | None:
    lib, _ = load_library()
    return None if lib is None else _NativePacker(lib)


def _in_dtype(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [N, K] in `dtype`; it may share memory with the given one."""
    if isinstance(weight, DenseWeight) and weight.weight.dtype == dtype:
        return weight.weight
    return dequantized(weight).to(dtype)


def round_to_int8(weight: Weight, group: int) -> tuple[GroupedWeight, float]:
    """Round to symmetric int8 in groups along the inputs (scale = absmax / 127, zero point 128); return weight and
    error.

    The error is the change by rounding, relative to a typical weight of the same output, as a root mean square over the
    outputs. A typical weight is the mean magnitude times 1.2533, which is the standard deviation of Gaussian weights;
    with a root mean square a few large weights would hide the errors of all others. For a meta tensor the error is
    taken to be 0.
    """
    num_outputs, num_inputs = weight.shape
    codes = torch.empty(num_outputs, num_inputs, dtype=torch.uint8, device=_device(weight))
    scales = torch.empty(num_outputs, num_inputs // group, device=_device(weight))

    def take(rows: slice, block: GroupedWeight) -> None:
        codes[rows], scales[rows] = block.codes, block.scales

    error = _round_blocks(weight, group, take)
    zeros = torch.full_like(scales, 128, dtype=torch.uint8)
    return GroupedWeight(codes, scales, zeros, bits=8, group_size=group, bias=weight.bias), error


def _round_blocks(weight: Weight, group: int, take: Callable[[slice, GroupedWeight], None]) -> float:
    """Round a weight some rows at a time, pass each part to `take`, and return the rounding error."""
    if is_meta_weight(weight):
        return 0.0
    squares = 0.0
    for rows in _blocks(weight.shape[0]):
        before = dequantized(_rows(weight, rows))
        pieces = before.view(len(before), -1, group)
        scales = pieces.abs().amax(dim=2) / 127
        scale = torch.where(scales > 0, scales, 1.0)[:, :, None]
        nearest = (pieces / scale).round_()
        codes = (nearest + 128).to(torch.uint8).view_as(before)
        take(rows, GroupedWeight(codes, scales, torch.full_like(scales, 128, dtype=torch.uint8), 8, group))
        changed = nearest.mul_(scale).sub_(pieces).square_().mean(dim=(1, 2))
        typical = (before.abs().mean(dim=1) * 1.2533).square_()
        # An output whose weights are all zero has no error.
        squares += (changed / typical).nan_to_num_(nan=0.0).sum().item()
    return math.sqrt(squares / weight.shape[0])


def dequantized(weight: Weight) -> torch.Tensor:
    """Return a weight of any kind dequantized to fp32 [N, K]; it may share memory with the given one."""
    return weight.weight.float() if isinstance(weight, DenseWeight) else weight.dequantize()


def dequantized_rows(weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    """Return some outputs (rows) of a weight, dequantized to fp32 [len(rows), K]."""
    return dequantized(_rows(weight, rows))


@overload
def _rows(weight: GroupedWeight, rows: slice) -> GroupedWeight: ...
@overload
def _rows(weight: Weight, rows: slice | torch.Tensor) -> Weight: ...
def _rows(weight: Weight, rows: slice | torch.Tensor) -> Weight:
    """Return some rows of a weight, without the bias; for fp8 with scales of blocks a slice must begin at a block."""
    if isinstance(weight, DenseWeight):
        return replace(weight, weight=weight.weight[rows], bias=None)
    if isinstance(weight, GroupedWeight):
        return replace(
            weight, codes=weight.codes[rows], scales=weight.scales[rows], zeros=weight.zeros[rows], bias=None
        )
    if not weight.in_blocks:
        return Fp8Weight(weight.codes[rows], weight.scales[rows] if weight.scales.shape[0] > 1 else weight.scales)
    if isinstance(rows, torch.Tensor):
        return DenseWeight(weight.dequantize()[rows])
    return Fp8Weight(weight.codes[rows], weight.scales[rows.start // FP8_BLOCK : -(-rows.stop // FP8_BLOCK)])


def _blocks(num_outputs: int) -> Iterator[slice]:
    for start in range(0, num_outputs, _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, num_outputs))


def _device(weight: Weight) -> str:
    return "meta" if is_meta_weight(weight) else "cpu"


def _empty_stream(weight: Weight, num_outputs: int, groups: int, group: int, bits: int) -> torch.Tensor:
    width = STRIP_METADATA + STRIP * group * bits // 8
    return _empty(weight, -(-num_outputs // STRIP), groups, width, dtype=torch.uint8)


def _empty(weight: Weight, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.empty(shape, dtype=dtype, device="meta")
        if is_meta_weight(weight)
        else lazy_pages.allocate_empty(*shape, dtype=dtype)
    )


def _lay_rows(stream: torch.Tensor, rows: slice, weight: GroupedWeight, bits: int) -> None:
    """Pack some rows of a grouped weight, which begin at a strip of 64, into their place in the packed stream."""
    strips, groups = -(-weight.shape[0] // STRIP), stream.shape[1]
    codes, scales, zeros = (_pad_rows(t, strips * STRIP) for t in (weight.codes, weight.scales.float(), weight.zeros))
    if bits == 4:
        pairs = codes.view(strips, STRIP, groups, -1, 2, 4)
        codes = pairs[:, :, :, :, 0] | pairs[:, :, :, :, 1] << 4
    scales, zeros = (t.view(strips, STRIP, groups).transpose(1, 2).contiguous() for t in (scales, zeros))
    place = stream[rows.start // STRIP :][:strips]
    torch.cat((scales.view(torch.uint8), zeros), dim=2, out=place[:, :, :STRIP_METADATA])
    words = codes.contiguous().view(torch.int32).view(strips, STRIP, groups, -1).permute(0, 2, 3, 1)
    # Copied as int32, since uint8 would be copied byte by byte.
    place.view(torch.int32)[:, :, STRIP_METADATA // 4 :].view(words.shape)[:] = words


def _pad_rows(t: torch.Tensor, rows: int) -> torch.Tensor:
    return F.pad(t, (0, 0, 0, rows - t.shape[0]))
