"""Layers that are not int4: dense ones through torch, int8 ones with activations of their own precision."""

from __future__ import annotations

import torch

from ..dtypes import TORCH
from ..held import Held, size
from ..rig import Rig
from ..w8a8 import int8
from ..w8a8.tensor_cores import Rows8
from ..weights import DenseWeight, GroupedWeight
from .configs import Configs, rounded

__all__ = ["DenseLinear", "Int8Linear"]


class DenseLinear:
    """y = x @ w.T + bias by torch, held and computed in what the policy computes in."""

    def __init__(self, weight: DenseWeight, rig: Rig, out: torch.dtype | None = None) -> None:
        """`out`: dtype of the result; None: that of x."""
        self._dtype = TORCH[rig.policy.compute]
        self._weight = weight.weight.to(rig.device, self._dtype)
        self._bias = None if weight.bias is None else weight.bias.to(rig.device, self._dtype)
        self._out = out
        self.kernel = f"torch.matmul {rig.policy.compute}"
        given = size(self._weight) if self._weight is weight.weight else 0
        self.held = Held(size(self._weight, self._bias), given=given)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x.to(self._dtype), self._weight, self._bias)
        return y.to(self._out or x.dtype)


class Int8Linear:
    """y = x @ w.T + bias, both in int8. Raises ValueError for what the capability or the kernels do not take."""

    def __init__(self, weight: GroupedWeight, rig: Rig, configs: Configs) -> None:
        if weight.shape[0] % 16:
            raise ValueError(f"int8 kernels are compiled for an N in sixteens, not {weight.shape[0]}")
        self._configs = configs
        self._permutation = None if weight.permutation is None else weight.permutation.to(rig.device)
        self._weight = int8.pack(_on(weight, rig.device), rig.policy)
        self._shape = weight.shape
        self.kernel = "w8a8"
        codes = self._weight.codes if isinstance(self._weight, Rows8) else self._weight.words
        metadata = size(self._weight.scales, self._weight.zeros, self._permutation)
        self.held = Held(size(codes, self._weight.bias), metadata)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = self._shape
        if not x.shape[0]:
            return x.new_empty((0, num_rows))
        if self._permutation is not None:
            x = x.index_select(1, self._permutation)
        zeros = "no" if self._weight.zeros is None else "yes"
        m = rounded(x.shape[0])
        config = self._configs.of("w8a8", m=m, n=num_rows, k=num_columns, group=self._weight.group, zeros=zeros)
        quantizing = self._configs.of(int8.quantizer(self._weight, x.shape[0]), m=m, k=num_columns)
        return int8.linear(x.contiguous(), self._weight, config, quantizing)


def _on(weight: GroupedWeight, device: torch.device) -> GroupedWeight:
    return GroupedWeight(
        weight.codes.to(device),
        weight.scales.to(device),
        weight.zeros.to(device),
        weight.bits,
        weight.group_size,
        None,
        None if weight.bias is None else weight.bias.to(device),
    )
