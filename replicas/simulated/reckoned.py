"""Rates in a simulated device's profile, calculated by the roofline where a real device measures them at warm-up."""

from __future__ import annotations

from ..protocol import BATCHES
from ..rates import Rates
from .device import SimulatedDevice

__all__ = ["LONG", "reckoned"]

LONG = 1 << 16  # tokens of context


def reckoned(device: SimulatedDevice, max_batch_tokens: int) -> Rates:
    """Return the rates of a device as its profile has them. Measured rates would reveal its true, hidden speed."""
    return Rates(
        prefill_tokens_per_s=max_batch_tokens / device.step_s(0, 0, [(max_batch_tokens, 512)]),
        decode_s=tuple(device.step_s(batch, batch) for batch in BATCHES),
        context_s=(device.step_s(1, LONG) - device.step_s(1, 1)) / (LONG - 1),
    )
