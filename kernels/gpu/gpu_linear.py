"""Linear layers on a GPU other than int4: dense ones by torch, and 8-bit ones with 8-bit activations."""

from __future__ import annotations

import torch

from ..canonical_weights import DenseWeight, Fp8Weight, GroupedWeight
from ..device.device_context import DeviceContext
from ..device.dtypes import TORCH_DTYPES
from ..launch.kernel_operation import round_up_power_of_two
from ..layer_memory import LayerMemory, total_nbytes
from ..packed_layer import PackedLayer, contiguous_on_host
from ..w8a8 import fp8_product, int8_product
from ..w8a8.dequantize_int8 import DEQUANTIZE, matmul
from ..w8a8.packed_int8 import PanelsInt8
from ..w8a8.tensor_core_gemm import PackedRows8
from .config_cache import ConfigCache


class DenseLinear:
    """Linear layer by torch, y = x @ w.T + bias, held and computed in the compute dtype of the policy."""

    LAYOUT = "dense"

    def __init__(self, weight: DenseWeight, device_context: DeviceContext, out: torch.dtype | None = None) -> None:
        """Move a weight to the device; `out` is the dtype of the result, or None for the dtype of x."""
        self._dtype = TORCH_DTYPES[device_context.policy.compute]
        self._weight = weight.weight.to(device_context.device, self._dtype)
        self._bias = None if weight.bias is None else weight.bias.to(device_context.device, self._dtype)
        self._out = out
        self.kernel = f"torch.matmul {device_context.policy.compute}"
        given = total_nbytes(self._weight) if self._weight is weight.weight else 0
        self.held = LayerMemory(total_nbytes(self._weight, self._bias), given=given)

    @classmethod
    def of(cls, packed: PackedLayer, device_context: DeviceContext, out: torch.dtype | None = None) -> DenseLinear:
        """Restore a dense layer from its packed form on the device, without packing weights again."""
        made = cls(DenseWeight(packed.tensors["weight"], packed.tensors.get("bias")), device_context, out)
        made.held = LayerMemory(total_nbytes(made._weight, made._bias))  # no other tensor shares its memory
        return made

    @property
    def packed(self) -> PackedLayer:
        return PackedLayer(self.LAYOUT, {}, contiguous_on_host(weight=self._weight, bias=self._bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x.to(self._dtype), self._weight, self._bias)
        return y.to(self._out or x.dtype)


class Int8Linear:
    """Linear layer y = x @ w.T + bias with w and x in int8, or for many rows with neither: see `w8a8/int8_product.py`.

    Raises ValueError for weights that the compute capability or the kernels do not support.
    """

    LAYOUT = "w8a8"

    def __init__(self, weight: GroupedWeight, device_context: DeviceContext, configs: ConfigCache) -> None:
        if weight.shape[0] % 16:
            raise ValueError(f"{weight.shape[0]} output features are not a multiple of 16, as the int8 kernels need")
        permutation = None if weight.permutation is None else weight.permutation.to(device_context.device)
        self._hold(
            int8_product.pack_int8(_move_to(weight, device_context.device), device_context.policy), permutation, configs
        )

    @classmethod
    def of(cls, packed: PackedLayer, device_context: DeviceContext, configs: ConfigCache) -> Int8Linear:
        """Restore an int8 layer from its packed form on the device, without packing weights again."""
        made = cls.__new__(cls)
        there = {name: tensor.to(device_context.device) for name, tensor in packed.tensors.items()}
        scales, zeros, bias, group = there["scales"], there.get("zeros"), there.get("bias"), packed.sizes["group"]
        weight: int8_product.PackedInt8
        if "words" in there:
            weight = PanelsInt8(there["words"], scales, zeros, packed.sizes["outputs"], group, bias)
        else:
            weight = PackedRows8(there["codes"], scales, zeros, group, bias=bias)
        made._hold(weight, there.get("order"), configs)
        return made

    def _hold(self, weight: int8_product.PackedInt8, permutation: torch.Tensor | None, configs: ConfigCache) -> None:
        self._weight, self._permutation, self._configs = weight, permutation, configs
        self.kernel = "w8a8"
        if isinstance(weight, PackedRows8):
            codes, self._shape = weight.codes, (weight.codes.shape[0], weight.codes.shape[1])
        else:
            codes, self._shape = weight.words, (weight.num_rows, 4 * weight.words.shape[1])
        metadata = total_nbytes(weight.scales, weight.zeros, permutation)
        self.held = LayerMemory(total_nbytes(codes, weight.bias), metadata)

    @property
    def packed(self) -> PackedLayer:
        weight = self._weight
        own = {"codes": weight.codes} if isinstance(weight, PackedRows8) else {"words": weight.words}
        tensors = contiguous_on_host(
            **own, scales=weight.scales, zeros=weight.zeros, order=self._permutation, bias=weight.bias
        )  # fmt: skip
        return PackedLayer(self.LAYOUT, {"outputs": self._shape[0], "group": weight.group}, tensors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = self._shape
        if not x.shape[0]:
            return x.new_empty((0, num_rows))
        if self._permutation is not None:
            x = x.index_select(1, self._permutation)
        operator, m = self.operator(x.shape[0]), round_up_power_of_two(x.shape[0])
        config = self._configs.of(operator, **self._fields(m))
        if operator == DEQUANTIZE.name and isinstance(self._weight, PanelsInt8):
            return matmul(x, self._weight, config)
        quantizing = self._configs.of(int8_product.quantizer_name(self._weight, x.shape[0]), m=m, k=num_columns)
        return int8_product.linear_int8(x.contiguous(), self._weight, config, quantizing)

    def operator(self, num_rows: int) -> str:
        """Name of the operator, a product in int8 or one after dequantizing, that multiplies `num_rows` rows of x."""
        return self._configs.kernel(int8_product.kernel_for, **self._fields(num_rows)).name

    def _fields(self, m: int) -> dict[str, int | str]:
        """Fields of the shape by which configs of this layer's product are looked up, for `m` rows of x."""
        zeros = "no" if self._weight.zeros is None else "yes"
        return {"m": m, "n": self._shape[0], "k": self._shape[1], "group": self._weight.group, "zeros": zeros}


class Fp8Linear:
    """Linear layer y = x @ w.T + bias with w and x in fp8: see `w8a8/fp8_product.py`.

    Raises ValueError for weights that the compute capability or the kernels do not support.
    """

    LAYOUT = "fp8"
    kernel = "fp8"

    def __init__(self, weight: Fp8Weight, device_context: DeviceContext, configs: ConfigCache) -> None:
        policy = device_context.policy
        if policy.fp8 is None:
            raise ValueError(f"fp8: compute capability {policy.capability} does not use it: {policy.reasons['fp8']}")
        if weight.shape[0] % 16:
            raise ValueError(f"{weight.shape[0]} output features are not a multiple of 16, as the fp8 kernels need")
        bias = None if weight.bias is None else weight.bias.to(device_context.device)
        self._hold(
            fp8_product.pack_fp8(
                Fp8Weight(weight.codes.to(device_context.device), weight.scales.to(device_context.device), bias)
            ),
            configs,
        )

    @classmethod
    def of(cls, packed: PackedLayer, device_context: DeviceContext, configs: ConfigCache) -> Fp8Linear:
        """Restore an fp8 layer from its packed form on the device, without packing weights again."""
        made, group, share = cls.__new__(cls), packed.sizes["group"], packed.sizes["share"]
        there = {name: tensor.to(device_context.device) for name, tensor in packed.tensors.items()}
        made._hold(PackedRows8(there["codes"], there["scales"], None, group, share, there.get("bias")), configs)
        return made

    def _hold(self, weight: PackedRows8, configs: ConfigCache) -> None:
        self._weight, self._configs = weight, configs
        self._shape = weight.codes.shape[0], weight.codes.shape[1]
        self.held = LayerMemory(total_nbytes(weight.codes, weight.bias), total_nbytes(weight.scales))

    @property
    def packed(self) -> PackedLayer:
        weight = self._weight
        sizes = {"group": weight.group, "share": weight.share}
        return PackedLayer(
            self.LAYOUT, sizes, contiguous_on_host(codes=weight.codes, scales=weight.scales, bias=weight.bias)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = self._shape
        if not x.shape[0]:
            return x.new_empty((0, num_rows))
        m = round_up_power_of_two(x.shape[0])
        config = self._configs.of("fp8", m=m, n=num_rows, k=num_columns, group=self._weight.group)
        quantizing = self._configs.of("quantize_rows_fp8", m=m, k=num_columns)
        return fp8_product.linear_fp8(x.contiguous(), self._weight, config, quantizing)


def _move_to(weight: GroupedWeight, device: torch.device) -> GroupedWeight:
    return GroupedWeight(
        weight.codes.to(device),
        weight.scales.to(device),
        weight.zeros.to(device),
        weight.bits,
        weight.group_size,
        None,
        None if weight.bias is None else weight.bias.to(device),
    )
