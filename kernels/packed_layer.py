"""A linear layer as its kernel holds it: what can be kept on disk and taken up again without repacking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from .contract import Linear, Role

__all__ = ["PackedLayer", "PackedLayerOps", "contiguous_on_host"]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Enough to make the layer again.

    kernel   its name in the op table
    sizes    whole numbers that the kernel is told
    tensors  contiguous; on the host, or where they are restored from on the device
    """

    kernel: str
    sizes: Mapping[str, int]
    tensors: Mapping[str, torch.Tensor]


def contiguous_on_host(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Those that there are, as `PackedLayer` has them; of an outline as they are."""
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {name: (tensor if tensor.is_meta else tensor.cpu()).contiguous() for name, tensor in there.items()}


@runtime_checkable
class PackedLayerOps(Protocol):
    """Operators whose layers can be kept."""

    @property
    def layout(self) -> str | None:
        """Equal where the same weight becomes the same bytes: code, processor or capability, settings.

        None: none can be kept.
        """
        ...

    def keeps(self, linear: Linear) -> bool:
        """Whether it can be kept: then `packed` tells it."""
        ...

    def packed(self, linear: Linear) -> PackedLayer | None:
        """None: one that cannot be kept."""
        ...

    def restored(self, packed: PackedLayer, role: Role) -> Linear:
        """The same layer. It holds on to these tensors, which begin at multiples of 64 bytes, where they are on the
        operators' device, and to copies there of others.
        """
        ...

    def restore_choices(self, choices: Mapping[str, str]) -> None:
        """What was chosen when the layers were made, and why."""
        ...
