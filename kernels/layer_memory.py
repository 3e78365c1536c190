"""What a linear layer keeps in memory, by what it is for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LayerMemory", "total_nbytes"]


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes. Made of tensors on the meta device it says what the same layer would keep, before anything is loaded.

    weights   codes or floating point numbers, and the bias
    metadata  scales, zero points, the order of the inputs
    given     of the weights, what lies in the very tensor that was given: a tied head may add nothing to the embedding
    """

    weights: int
    metadata: int = 0
    given: int = 0

    @property
    def nbytes(self) -> int:
        return self.weights + self.metadata

    def __add__(self, other: LayerMemory) -> LayerMemory:
        return LayerMemory(self.weights + other.weights, self.metadata + other.metadata, self.given + other.given)


def total_nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of those that there are."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
