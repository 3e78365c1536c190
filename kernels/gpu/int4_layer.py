"""int4 linear layer on one GPU, which chooses kernel and config by the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..canonical_weights import GroupedWeight
from ..device.device_context import DeviceContext
from ..launch.config_tables import ConfigChoice
from ..launch.kernel_operation import round_up_power_of_two
from ..launch.variant import Config
from ..packed_layer import PackedLayer, contiguous_on_host
from ..w4a16.int4_operations import Int4Kernel, kernel_for
from ..w4a16.packed_int4 import PackedInt4, check_row_multiple, fuse_weights, pack_int4
from .config_cache import ConfigCache


class Int4Linear:
    """Linear layer y [M, N] = x [M, K] @ w.T + bias with int4 weights, in the dtype of x, for any M.

    kernel  name of the operator in the tuned tables that serves one token
    held    memory that the layer keeps
    """

    LAYOUT = "w4a16"  # name of the packed layout: all three kernels read the same words

    def __init__(self, weights: Sequence[GroupedWeight], device_context: DeviceContext, configs: ConfigCache) -> None:
        """Pack weights that have the same input into one layer: Q, K and V, or gate and up.

        Raises ValueError as `pack_int4` and `fuse_weights` do, and for numbers of rows that the kernels were not
        compiled for.
        """
        self._hold(
            _move_to(fuse_weights([pack_int4(weight) for weight in weights]), device_context.device),
            device_context,
            configs,
        )

    @classmethod
    def of(cls, packed: PackedLayer, device_context: DeviceContext, configs: ConfigCache) -> Int4Linear:
        """Restore an int4 layer from its packed form on the device, without packing weights again."""
        made, tensors = cls.__new__(cls), packed.tensors
        words, scales, zeros = (tensors[name] for name in ("words", "scales", "zeros"))
        others = tensors.get("order"), tensors.get("bias")
        made._hold(
            _move_to(PackedInt4(words, scales, zeros, packed.sizes["group"], *others), device_context.device),
            device_context,
            configs,
        )
        return made

    def _hold(self, weight: PackedInt4, device_context: DeviceContext, configs: ConfigCache) -> None:
        self._weight = check_row_multiple(weight)
        self._device_context, self._configs = device_context, configs
        self.kernel = self.choice(1)[0].name
        self.held = self._weight.held

    @property
    def packed(self) -> PackedLayer:
        weight = self._weight
        tensors = contiguous_on_host(
            words=weight.words, scales=weight.scales, zeros=weight.zeros, order=weight.permutation, bias=weight.bias
        )  # fmt: skip
        return PackedLayer(self.LAYOUT, {"group": weight.group_size}, tensors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_tokens = x.shape[0]
        if not num_tokens:
            return x.new_empty((0, self._weight.shape[0]))
        if self._weight.permutation is not None:
            x = x.index_select(1, self._weight.permutation)
        operation, config = self.choice(num_tokens)
        return operation.launch(x.contiguous(), self._weight, self._device_context.policy, config)

    def choice(self, num_tokens: int) -> tuple[Int4Kernel, Config]:
        """Return the int4 kernel that serves `num_tokens` tokens, and its launch config."""
        operation, found = self.looked_up(num_tokens)
        return operation, found.config

    def looked_up(self, num_tokens: int) -> tuple[Int4Kernel, ConfigChoice]:
        """Return the int4 kernel that serves `num_tokens` tokens, its launch config, and how the config was found.

        The config is that of the number of tokens rounded up to a power of two.
        """
        num_rows, num_columns = self._weight.shape
        sizes = {"n": num_rows, "k": num_columns, "group": self._weight.group_size}
        operation = self._configs.kernel(kernel_for, m=num_tokens, **sizes)
        return operation, self._configs.looked_up(operation.name, m=round_up_power_of_two(num_tokens), **sizes)


def _move_to(weight: PackedInt4, device: torch.device) -> PackedInt4:
    return PackedInt4(
        weight.words.to(device),
        weight.scales.to(device),
        weight.zeros.to(device),
        weight.group_size,
        None if weight.permutation is None else weight.permutation.to(device),
        None if weight.bias is None else weight.bias.to(device),
    )
