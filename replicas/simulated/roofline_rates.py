"""Rates in a simulated device's profile, calculated by the roofline where a real device measures them at warm-up."""

from __future__ import annotations

from ..engine.startup.engine_rates import EngineRates
from ..types import PROFILED_BATCH_SIZES
from .simulated_device import SimulatedDevice

LONG_CONTEXT = 1 << 16  # tokens of context


def roofline_rates(device: SimulatedDevice, max_batch_tokens: int) -> EngineRates:
    """Return the rates of a device as its profile has them. Measured rates would reveal its true, hidden speed."""
    return EngineRates(
        prefill_tokens_per_s=max_batch_tokens / device.step_s(0, 0, [(max_batch_tokens, 512)]),
        decode_s=tuple(device.step_s(batch, batch) for batch in PROFILED_BATCH_SIZES),
        context_s=(device.step_s(1, LONG_CONTEXT) - device.step_s(1, 1)) / (LONG_CONTEXT - 1),
    )
