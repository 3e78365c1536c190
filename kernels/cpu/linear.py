"""Linear layers on a CPU by our own C kernels: the same bits for a row whatever else is in the batch."""

from __future__ import annotations

import ctypes

import torch

from ..held import Held, size
from ..weights import GroupedWeight, Weight
from .native import TYPES, DenseArgs, GroupedArgs, OutOfMemory
from .pack import STRIP_METADATA, dequantized, group_for, interleave, interleave_dense, regroup
from .setting import Setting, Unsuitable, require, within_int8


class NativeGrouped:
    """csrc/linear.c: integer weights in groups, x rounded to int8 per row and group.

    Bound: y is within 1% (root mean square) of the product in fp32, for x without outliers. Exact in the sense
    of `numerics`: integer sums, groups added in order.
    """

    def __init__(self, weight: GroupedWeight, bits: int, setting: Setting) -> None:
        group = group_for(weight.shape[1], weight.group_size)
        if setting.native is None or group is None:
            raise Unsuitable("no C kernels" if group else f"group size {weight.group_size}")
        self.kernel = f"c-int{bits}"
        self._native, self._num_outputs, self._out = setting.native, weight.shape[0], setting.out_dtype
        bias = None if weight.bias is None else weight.bias.float().contiguous()
        order = None if weight.permutation is None else weight.permutation.int().contiguous()
        self._kept = (interleave(regroup(weight, group), bits), bias, order)
        metadata = weight.shape[1] // group * self._kept[0].shape[0] * STRIP_METADATA
        self.held = Held(size(self._kept[0], bias) - metadata, metadata + size(order))
        pointers = (None if t is None else t.data_ptr() for t in self._kept)
        self._args = GroupedArgs(*pointers, *weight.shape, group, bits)
        self._ref = ctypes.byref(self._args)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self._num_outputs, dtype=self._out)
        native = self._native
        types = TYPES[x.dtype], TYPES[self._out]
        if native.grouped(self._ref, x.data_ptr(), y.data_ptr(), rows, *types, native.threads):
            raise OutOfMemory(f"a linear layer over {rows} rows")
        return y


class NativeDense:
    """csrc/dense.c: fp32 or bf16 weights, summed in fp32 in one order for every number of rows."""

    kernel = "c-dense"

    def __init__(self, weight: Weight, setting: Setting) -> None:
        if setting.native is None:
            raise Unsuitable("no C kernels")
        self._native, self._num_outputs, self._out = setting.native, weight.shape[0], setting.out_dtype
        packed = interleave_dense(dequantized(weight).to(setting.dtype))
        bias = None if weight.bias is None else weight.bias.float().contiguous()
        self._kept = (packed, bias)
        self.held = Held(size(packed, bias))
        pointers = (None if t is None else t.data_ptr() for t in self._kept)
        self._args = DenseArgs(*pointers, *weight.shape, TYPES[setting.dtype], TYPES[self._out])
        self._ref = ctypes.byref(self._args)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty(x.shape[0], self._num_outputs, dtype=self._out)
        self._native.dense(self._ref, x.data_ptr(), y.data_ptr(), x.shape[0], self._native.threads)
        return y


def as_stored(weight: Weight, setting: Setting) -> NativeGrouped:
    """4-bit codes in 4 bits, 8-bit codes in 8."""
    require(isinstance(weight, GroupedWeight), "the weights are not quantized")
    assert isinstance(weight, GroupedWeight)
    return NativeGrouped(weight, weight.bits, setting)


def in_bytes(weight: Weight, setting: Setting) -> NativeGrouped:
    """A byte for every weight: 4-bit codes as they are, dense weights rounded to int8 in groups."""
    if isinstance(weight, GroupedWeight):
        return NativeGrouped(weight, 8, setting)
    group = group_for(weight.shape[1], weight.shape[1])
    if setting.native is None or group is None:
        raise Unsuitable("no C kernels" if group else f"{weight.shape[1]} inputs are no multiple of 16")
    return NativeGrouped(within_int8(weight, group), 8, setting)
