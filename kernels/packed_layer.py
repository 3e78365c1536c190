"""Linear layer in the packed form that its kernel reads, which can be stored on disk and loaded without repacking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from .contract import Linear, Role


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Packed weights of a linear layer: enough to make the layer again.

    kernel   name of its kernel in the op table
    sizes    integers that the kernel needs
    tensors  contiguous; on the host, or on the device where they are restored from
    """

    kernel: str
    sizes: Mapping[str, int]
    tensors: Mapping[str, torch.Tensor]


def contiguous_on_host(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the tensors that are not None, contiguous and on the host; meta tensors stay on the meta device."""
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {name: (tensor if tensor.is_meta else tensor.cpu()).contiguous() for name, tensor in there.items()}


@runtime_checkable
class PackedLayerOps(Protocol):
    """Operators whose packed layers can be stored and restored."""

    @property
    def layout(self) -> str | None:
        """Digest of the packed layout: equal where the same weight is packed into the same bytes.

        It depends on the code, on the processor or compute capability, and on settings. None: no layer can be stored.
        """
        ...

    def keeps(self, linear: Linear) -> bool:
        """Return whether a layer can be stored, i.e. whether `packed` returns its packed form."""
        ...

    def packed(self, linear: Linear) -> PackedLayer | None:
        """Return the packed form of a layer, or None if the layer cannot be stored."""
        ...

    def restored(self, packed: PackedLayer, role: Role) -> Linear:
        """Return the layer that was packed.

        It keeps references to these tensors, which begin at multiples of 64 bytes, where they are on the operators'
        device, and to copies on the device where they are not.
        """
        ...

    def restore_choices(self, choices: Mapping[str, str]) -> None:
        """Restore the choices of kernels, with their reasons, for packed layers that come from a cache."""
        ...
