"""Measurement of how much a linear kernel's rounding changes its outputs, for each weight before the kernel is
chosen.
"""

from __future__ import annotations

import functools

import torch

from ...canonical_weights import Weight
from ...contract import Linear
from .cpu_packing import dequantized_rows

# Above this error no integer kernel is chosen, for a layer or for the head. On the demo model the KL divergence from
# fp32 is at most 8 times the square of the layers' error, and bf16 itself adds 0.00025: within 0.002 nats per token.
# Measured: c-int4 error 0.009, KL 0.0005; onednn-int8 0.015 to 0.020, 0.0020; torch-int4 0.003, 0.00025;
# an int8 head 0.014, 0.0003 to 0.0004; dense bf16 0.0024, 0.00014 to 0.00024 (test_quality repeats these measurements).
# That is no bound for other models: on SmolLM2-135M the same kernels cost 0.006 to 0.007 nats, and dense bf16 0.0007.
ROUNDING_BOUND = 0.016

_PROBE_ROWS = 16  # rows of activations
_OUTPUTS = 128  # outputs of the weight that are compared, spread evenly
_SPREAD = 0.7  # standard deviation of the logarithm of a channel's size


def rounding_error(linear: Linear, weight: Weight, dtype: torch.dtype) -> float:
    """Return the root mean square of the kernel's error, relative to the root mean square of the product in fp32.

    It is measured on probe activations in `dtype` whose channels differ in magnitude as a model's do, without the bias.
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
    """Return the probe activations fp32 [16, K], always the same: Gaussian, with a different magnitude for each
    channel.
    """
    generator = torch.Generator().manual_seed(num_inputs)
    sizes = torch.exp(_SPREAD * torch.randn(num_inputs, generator=generator))
    return torch.randn(_PROBE_ROWS, num_inputs, generator=generator) * sizes
