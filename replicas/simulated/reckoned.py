"""What a simulated device's profile says: the roofline's word for what a real one measures at warm-up."""

from __future__ import annotations

from ..protocol import BATCHES
from ..rates import Rates
from .device import SimulatedDevice

__all__ = ["LONG", "reckoned"]

LONG = 1 << 16  # tokens of context


def reckoned(device: SimulatedDevice, max_batch_tokens: int) -> Rates:
    """Of a device as everybody knows it: measured, its rates would tell what is hidden of the true one."""
    return Rates(
        prefill_tokens_per_s=max_batch_tokens / device.step_s(0, 0, [(max_batch_tokens, 512)]),
        decode_s=tuple(device.step_s(batch, batch) for batch in BATCHES),
        context_s=(device.step_s(1, LONG) - device.step_s(1, 1)) / (LONG - 1),
    )
