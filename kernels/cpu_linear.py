"""Linear layers on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .weights import DenseWeight, Weight


class DenseLinear:
    """Weights held in the dtype of the activations; quantized ones are dequantised."""

    kernel = "dense"

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        dense = weight.weight if isinstance(weight, DenseWeight) else weight.dequantize()
        self.weight = dense.to(dtype).contiguous()
        self.bias = None if weight.bias is None else weight.bias.to(dtype)
        self.nbytes = self.weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
