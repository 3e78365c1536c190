"""Linear layers on a CPU by our own C kernels: a row's result has the same bits whatever else is in the batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ...canonical_weights import GroupedWeight, Weight
from ...layer_memory import LayerMemory, total_nbytes
from ...packed_layer import PackedLayer
from ..c_kernels.native_kernels import TYPES, DenseArgs, GroupedArgs, NativeKernels, NativeOutOfMemory
from .cpu_packing import STRIP_METADATA, group_for, interleave, interleave_dense, interleave_int8, regroup
from .linear_settings import CpuLinearSettings, UnsuitableKernel, require_int8, require_suitable

_GROUPED, _DENSE = ("stream", "bias", "order"), ("weights", "bias")  # names of the tensors that the layers keep
_SIZES = ("outputs", "inputs", "group", "bits")


class NativeGroupedLinear:
    """Linear layer by csrc/linear.c: integer weights in groups, x rounded to int8 per row and group.

    Error bound: y is within 1% (root mean square) of the product in fp32, for x without outliers. It is exact in the
    sense of `numerics`: sums are integers, and groups are added in order.
    """

    def __init__(self, weight: GroupedWeight, bits: int, setting: CpuLinearSettings) -> None:
        group = group_for(weight.shape[1], weight.group_size)
        if setting.native is None or group is None:
            raise UnsuitableKernel("no C kernels" if group else f"group size {weight.group_size}")
        bias = None if weight.bias is None else weight.bias.float().contiguous()
        order = None if weight.permutation is None else weight.permutation.int().contiguous()
        packed_tensors = (interleave(regroup(weight, group), bits), bias, order)
        self._hold(packed_tensors, (*weight.shape, group, bits), setting.native, setting)

    @classmethod
    def of(cls, packed: PackedLayer, setting: CpuLinearSettings) -> NativeGroupedLinear:
        """Restore a grouped integer layer from its packed form, without packing weights again."""
        made = cls.__new__(cls)
        assert setting.native is not None
        stream, *others = (packed.tensors.get(name) for name in _GROUPED)
        assert stream is not None
        made._hold((stream, *others), tuple(packed.sizes[name] for name in _SIZES), setting.native, setting)
        return made

    def _hold(
        self,
        packed_tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        native: NativeKernels,
        setting: CpuLinearSettings,
    ) -> None:
        num_outputs, num_inputs, group, bits = sizes
        stream, bias, order = packed_tensors
        assert stream is not None
        self.kernel = f"c-int{bits}"
        self._native, self._num_outputs, self._out = native, num_outputs, setting.out_dtype
        self._packed_tensors = packed_tensors
        metadata = num_inputs // group * stream.shape[0] * STRIP_METADATA
        self.held = LayerMemory(total_nbytes(stream, bias) - metadata, metadata + total_nbytes(order))
        pointers = (None if t is None else t.data_ptr() for t in packed_tensors)
        self._args = GroupedArgs(*pointers, *sizes)
        self._ref = ctypes.byref(self._args)
        self._sizes = sizes

    @property
    def packed(self) -> PackedLayer:
        return PackedLayer(
            self.kernel, dict(zip(_SIZES, self._sizes, strict=True)), _tensors_by_name(_GROUPED, self._packed_tensors)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self._num_outputs, dtype=self._out)
        native = self._native
        types = TYPES[x.dtype], TYPES[self._out]
        if native.grouped(self._ref, x.data_ptr(), y.data_ptr(), rows, *types, native.threads):
            raise NativeOutOfMemory(f"there is no memory for a linear layer over {rows} rows")
        return y


class NativeDenseLinear:
    """Linear layer by csrc/dense.c: fp32 or bf16 weights, summed in fp32 in the same order for every number of rows."""

    kernel = "c-dense"

    def __init__(self, weight: Weight, setting: CpuLinearSettings) -> None:
        if setting.native is None:
            raise UnsuitableKernel("no C kernels")
        packed = interleave_dense(weight, setting.dtype)
        bias = None if weight.bias is None else weight.bias.float().contiguous()
        self._hold((packed, bias), weight.shape, setting.native, setting)

    @classmethod
    def of(cls, packed: PackedLayer, setting: CpuLinearSettings) -> NativeDenseLinear:
        """Restore a dense layer from its packed form, without packing weights again."""
        made = cls.__new__(cls)
        assert setting.native is not None
        packed_tensors = [packed.tensors.get(name) for name in _DENSE]
        made._hold(packed_tensors, tuple(packed.sizes[name] for name in _SIZES[:2]), setting.native, setting)
        return made

    def _hold(
        self,
        packed_tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        native: NativeKernels,
        setting: CpuLinearSettings,
    ) -> None:
        self._native, self._num_outputs, self._out = native, sizes[0], setting.out_dtype
        self._packed_tensors, self._sizes = packed_tensors, sizes
        self.held = LayerMemory(total_nbytes(*packed_tensors))
        pointers = (None if t is None else t.data_ptr() for t in packed_tensors)
        self._args = DenseArgs(*pointers, *sizes, TYPES[setting.dtype], TYPES[self._out])
        self._ref = ctypes.byref(self._args)

    @property
    def packed(self) -> PackedLayer:
        return PackedLayer(
            self.kernel, dict(zip(_SIZES, self._sizes, strict=False)), _tensors_by_name(_DENSE, self._packed_tensors)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty(x.shape[0], self._num_outputs, dtype=self._out)
        self._native.dense(self._ref, x.data_ptr(), y.data_ptr(), x.shape[0], self._native.threads)
        return y


def build_as_stored(weight: Weight, setting: CpuLinearSettings) -> NativeGroupedLinear:
    """Build a linear layer that holds 4-bit codes in 4 bits and 8-bit codes in 8, as the checkpoint stores them.

    Raises UnsuitableKernel for weights that are not quantized, and for group sizes that the kernel does not support.
    """
    require_suitable(isinstance(weight, GroupedWeight), "the weights are not quantized")
    assert isinstance(weight, GroupedWeight)
    return NativeGroupedLinear(weight, weight.bits, setting)


def build_int8(weight: Weight, setting: CpuLinearSettings) -> NativeGroupedLinear:
    """Return a layer that holds a byte per weight: 4-bit codes unchanged, dense weights rounded to int8 in groups.

    Raises UnsuitableKernel where rounding changes the weights too much.
    """
    if isinstance(weight, GroupedWeight):
        return NativeGroupedLinear(weight, 8, setting)
    group = group_for(weight.shape[1], weight.shape[1])
    if setting.native is None or group is None:
        raise UnsuitableKernel("no C kernels" if group else f"{weight.shape[1]} inputs are no multiple of 16")
    stream, error = interleave_int8(weight, group)
    require_int8(error)
    tensors = {"stream": stream} | ({} if weight.bias is None else {"bias": weight.bias.float().contiguous()})
    return NativeGroupedLinear.of(
        PackedLayer("c-int8", dict(zip(_SIZES, (*weight.shape, group, 8), strict=True)), tensors), setting
    )


def restore_linear(packed: PackedLayer, setting: CpuLinearSettings) -> NativeGroupedLinear | NativeDenseLinear:
    """Restore a CPU linear layer, dense or of integer weights, from its packed form."""
    return (
        NativeDenseLinear.of(packed, setting)
        if packed.kernel == NativeDenseLinear.kernel
        else NativeGroupedLinear.of(packed, setting)
    )


def _tensors_by_name(names: Sequence[str], packed_tensors: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in zip(names, packed_tensors, strict=True) if tensor is not None}
