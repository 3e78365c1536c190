"""Memory that a linear layer keeps, by purpose."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes that a linear layer keeps; computed from meta tensors it predicts this before anything is loaded.

    weights   bytes of codes or floating point numbers, and of the bias
    metadata  bytes of scales, zero points and the order of the inputs
    given     bytes of `weights` that lie in the very tensor that was given, e.g. a tied head may add nothing to the
              embedding
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
    """Sum of the bytes of the tensors that are not None."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
