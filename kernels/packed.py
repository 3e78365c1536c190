"""A linear layer as its kernel holds it: what can be kept on disk and taken up again without repacking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from .contract import Linear, Role

__all__ = ["Packed", "Repacking"]


@dataclass(frozen=True, slots=True)
class Packed:
    """Enough to make the layer again.

    kernel   its name in the op table
    sizes    whole numbers that the kernel is told
    tensors  contiguous, on the host
    """

    kernel: str
    sizes: Mapping[str, int]
    tensors: Mapping[str, torch.Tensor]


@runtime_checkable
class Repacking(Protocol):
    """Operators whose layers can be kept."""

    @property
    def layout(self) -> str | None:
        """Equal where the same weight becomes the same bytes: code, processor, settings. None: none can be kept."""
        ...

    def packed(self, linear: Linear) -> Packed | None:
        """None: one that cannot be kept."""
        ...

    def restored(self, packed: Packed, role: Role) -> Linear:
        """The same layer; it holds on to these tensors, which begin at multiples of 64 bytes."""
        ...

    def recall(self, choices: Mapping[str, str]) -> None:
        """What was chosen when the layers were made, and why."""
        ...
