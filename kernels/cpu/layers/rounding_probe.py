"""How much a linear kernel's rounding changes its outputs: measured on each weight before the kernel is chosen."""

from __future__ import annotations

import functools

import torch

from ...canonical_weights import Weight
from ...contract import Linear
from .cpu_packing import dequantized_rows

__all__ = ["ROUNDING_BOUND", "rounding_error"]

# Above it no integer kernel is chosen, for a layer or for the head. On the demo model the divergence from fp32 is
# at most 8 times the square of the layers' error, and bf16 itself adds 0.00025: within 0.002 nats per token.
# Measured: c-int4 error 0.009, KL 0.0005; onednn-int8 0.015 to 0.020, 0.0020; torch-int4 0.003, 0.00025;
# an int8 head 0.014, 0.0003 to 0.0004; dense bf16 0.0024, 0.00014 to 0.00024 (test_quality measures them again).
ROUNDING_BOUND = 0.016

_PROBE_ROWS = 16  # of activations
_OUTPUTS = 128  # of the weight that are compared; spread evenly
_SPREAD = 0.7  # standard deviation of the logarithm of a channel's size


def rounding_error(linear: Linear, weight: Weight, dtype: torch.dtype) -> float:
    """Root mean square of what the kernel gives beside the product in fp32, relative to that product's own.

    For a probe of activations in `dtype` whose channels differ in size as a model's do. No bias.
    """
    num_outputs, num_inputs = weight.shape
    x = _probe_activations(num_inputs).to(dtype)
    rows = torch.arange(0, num_outputs, max(1, num_outputs // _OUTPUTS))
    exact = x.float() @ dequantized_rows(weight, rows).T
    given = linear(x).float()[:, rows]
    if weight.bias is not None:
        given -= weight.bias[rows].float()
    size = float(exact.square().mean())
    return float(((given - exact).square().mean() / size).sqrt()) if size > 0 else 0.0


@functools.cache
def _probe_activations(num_inputs: int) -> torch.Tensor:
    """fp32 [16, K], always the same: Gaussian, each channel with a size of its own."""
    generator = torch.Generator().manual_seed(num_inputs)
    sizes = torch.exp(_SPREAD * torch.randn(num_inputs, generator=generator))
    return torch.randn(_PROBE_ROWS, num_inputs, generator=generator) * sizes
