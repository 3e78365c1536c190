"""Expected decode speed of an offloaded model on a GPU: layers, reads and copies are measured one by one.

`offloaded_step_s` adds that they overlap. Computing is measured over whole steps with buffers of zeros that all layers
share: what is launched, and how long it takes, does not depend on values. The first round is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from ...gpu.accelerator import Accelerator
from ...model.decoder import Decoder
from ...model.layers import allocate_kv
from ..disk.disk_speed import MEASURED_READ_BYTES, measure_decode, one_token_batch
from ..planning.device_plan import offloaded_step_s
from ..planning.disk_plan import DecodeEstimate
from .device_tier import DeviceTier, OffloadedLayer
from .piecewise_decoder import PiecewiseStep

__all__ = ["measure_offloaded_decode"]

_ROUNDS = 3


def measure_offloaded_decode(decoder: Decoder, accelerator: Accelerator | None) -> DecodeEstimate:
    """Measure the expected speed of an offloaded decoder that is whole and that nothing else uses. Raises
    EngineFault.
    """
    tier = decoder.tier
    if not isinstance(tier, DeviceTier):
        return measure_decode(decoder)
    assert accelerator is not None, "there is a device"
    layers = len(decoder.layers)
    compute_s, rest_s = _measure_compute(decoder, accelerator)
    reads = _measure_rate(tier, tier.plan.on("disk"), tier.read_alone)
    copies = _measure_rate(tier, tier.plan.layers, tier.copy_alone)
    unbound = float("inf")
    layers_s = (compute_s / layers,) * layers
    step_s = offloaded_step_s(tier.plan, copies or unbound, reads or unbound, layers_s, rest_s)
    return DecodeEstimate(reads, layers_s, rest_s, step_s, copies)


def _measure_compute(decoder: Decoder, accelerator: Accelerator) -> tuple[float, float]:
    """Return the seconds that all layers of a step of one token take, and those of the rest of the step."""
    kv = allocate_kv(decoder.ops, decoder.local.layers, 1)
    layers = [layer.twins[0] if isinstance(layer, OffloadedLayer) else layer for layer in decoder.layers]
    inner: list[float] = []
    rest: list[float] = []
    for _ in range(_ROUNDS):
        step = PiecewiseStep(decoder, kv)
        before = _seconds(accelerator, partial(_begin, step, accelerator))
        inner.append(_seconds(accelerator, partial(step.through, 0, layers)))
        rest.append(before + _seconds(accelerator, partial(_end, step)))
    return statistics.fmean(inner[1:]), statistics.fmean(rest[1:])


def _begin(step: PiecewiseStep, accelerator: Accelerator) -> None:
    step.begin(one_token_batch(accelerator.moved))


def _end(step: PiecewiseStep) -> None:
    step.forward(step.batch, []).argmax()


def _seconds(accelerator: Accelerator, work: Callable[[], None]) -> float:
    began = time.perf_counter()
    accelerator.submit(work)
    accelerator.mark().wait()
    return time.perf_counter() - began


def _measure_rate(tier: DeviceTier, layers: Sequence[int], move: Callable[[int], None]) -> float | None:
    """Bytes a second at which `move` moves these layers, each alone; None if there are no layers."""
    if not layers:
        return None
    rates: list[float] = []
    moved = 0
    for layer in (layers[0], *layers, *layers):
        nbytes = tier.plan.sizes.layers[layer]
        began = time.perf_counter()
        move(layer)
        rates.append(nbytes / (time.perf_counter() - began))
        moved += nbytes
        if moved > MEASURED_READ_BYTES and len(rates) > 1:
            break
    return statistics.harmonic_mean(rates[1:])
