"""One int4 layer on one device: which kernel and which config, by the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..gpu.configs import Configs
from ..operation import rounded
from ..packed import Packed, on_host
from ..rig import Rig
from ..tuning import Choice
from ..variant import Config
from ..weights import GroupedWeight
from .operations import Kernel, kernel_for
from .packed import PackedInt4, fuse, in_sixteens, pack

__all__ = ["Int4Linear"]


class Int4Linear:
    """y [M, N] = x [M, K] @ w.T + bias in the dtype of x, for any M.

    kernel  the operator's name in the tables, for one token
    held    what it keeps
    """

    LAYOUT = "w4a16"  # of what is kept: all three kernels read the same words

    def __init__(self, weights: Sequence[GroupedWeight], rig: Rig, configs: Configs) -> None:
        """Weights of one input are one layer: Q, K and V, or gate and up.

        Raises ValueError as `pack` and `fuse` do, and for rows that the kernels were not compiled for.
        """
        self._hold(_on(fuse([pack(weight) for weight in weights]), rig.device), rig, configs)

    @classmethod
    def of(cls, packed: Packed, rig: Rig, configs: Configs) -> Int4Linear:
        """One that was made before."""
        made, tensors = cls.__new__(cls), packed.tensors
        words, scales, zeros = (tensors[name] for name in ("words", "scales", "zeros"))
        others = tensors.get("order"), tensors.get("bias")
        made._hold(_on(PackedInt4(words, scales, zeros, packed.sizes["group"], *others), rig.device), rig, configs)
        return made

    def _hold(self, weight: PackedInt4, rig: Rig, configs: Configs) -> None:
        self._weight = in_sixteens(weight)
        self._rig, self._configs = rig, configs
        self.kernel = self.choice(1)[0].name
        self.held = self._weight.held

    @property
    def packed(self) -> Packed:
        weight = self._weight
        tensors = on_host(
            words=weight.words, scales=weight.scales, zeros=weight.zeros, order=weight.permutation, bias=weight.bias
        )  # fmt: skip
        return Packed(self.LAYOUT, {"group": weight.group_size}, tensors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_tokens = x.shape[0]
        if not num_tokens:
            return x.new_empty((0, self._weight.shape[0]))
        if self._weight.permutation is not None:
            x = x.index_select(1, self._weight.permutation)
        operation, config = self.choice(num_tokens)
        return operation.launch(x.contiguous(), self._weight, self._rig.policy, config)

    def choice(self, num_tokens: int) -> tuple[Kernel, Config]:
        """The kernel and its config."""
        operation, found = self.looked_up(num_tokens)
        return operation, found.config

    def looked_up(self, num_tokens: int) -> tuple[Kernel, Choice]:
        """The same, and how the config was found: that of about so many tokens, up to a power of two."""
        num_rows, num_columns = self._weight.shape
        sizes = {"n": num_rows, "k": num_columns, "group": self._weight.group_size}
        operation = self._configs.kernel(kernel_for, m=num_tokens, **sizes)
        return operation, self._configs.looked_up(operation.name, m=rounded(num_tokens), **sizes)


def _on(weight: PackedInt4, device: torch.device) -> PackedInt4:
    return PackedInt4(
        weight.words.to(device),
        weight.scales.to(device),
        weight.zeros.to(device),
        weight.group_size,
        None if weight.permutation is None else weight.permutation.to(device),
        None if weight.bias is None else weight.bias.to(device),
    )
