"""Specification of a device: number of SMs, speed, memory, and the source of each figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .compute_capability import Capability

# fp32, fp16: multiply-adds of CUDA cores. dp4a: four int8 multiply-adds. tensor-*: tensor cores, summing in fp32 (int8:
# in int32); tensor-fp16-16 sums in fp16.
Arithmetic = Literal[
    "fp32", "fp16", "dp4a", "tensor-fp16", "tensor-fp16-16", "tensor-bf16", "tensor-int8", "tensor-fp8"
]
ARITHMETIC: tuple[Arithmetic, ...] = (
    *("fp32", "fp16", "dp4a"),
    *("tensor-fp16", "tensor-fp16-16", "tensor-bf16", "tensor-int8", "tensor-fp8"),
)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Specification of a device, in bytes, bytes/s, Hz and operations/s; rates are dense, never with sparsity.

    A multiply-add is two operations.

    rates      a missing rate means that the device cannot do it, or that nobody has published its speed
    published  rates that NVIDIA published; the others are SMs x multiply-adds x 2 x clock
    sources    source of each figure, by field or kind of arithmetic; "uncertain" in it means what it says
    """

    name: str
    capability: Capability
    sms: int
    memory: int
    bandwidth: float
    l2: int | None
    clock: float | None
    tensor_clock: float | None
    half_rate: bool  # whether tensor cores sum in fp32 at half the rate of fp16
    published: Mapping[Arithmetic, float]
    sources: Mapping[str, str]
    names: tuple[str, ...] = ()  # names that torch reports
    rates: Mapping[Arithmetic, float] = field(init=False)

    def __post_init__(self) -> None:
        rates = {kind: self.published.get(kind) or computed_rate(self, kind) for kind in ARITHMETIC}
        object.__setattr__(self, "rates", {kind: rate for kind, rate in rates.items() if rate})

    def source(self, figure: str) -> str:
        """Return the source of a field's or a rate's figure. Raises KeyError if this device has no such figure."""
        if figure in self.rates and figure not in self.published:
            clock = self.tensor_clock if figure.startswith("tensor") else self.clock
            return f"computed: {self.sms} SMs x multiply-adds per SM x 2 x {(clock or 0) / 1e6:.0f} MHz"
        return self.sources[figure]

    def scaled(self, sms: int) -> DeviceSpec:
        """Return the same device with another number of SMs, and its share of the rates and of the bandwidth."""
        if sms == self.sms:
            return self
        share = sms / self.sms
        note = f"computed: {sms} of the {self.sms} SMs of {self.name}"
        return replace(
            self,
            sms=sms,
            bandwidth=self.bandwidth * share,
            published={kind: rate * share for kind, rate in self.published.items()},
            sources={**self.sources, **dict.fromkeys(("sms", "bandwidth", *self.published), note)},
        )


def computed_rate(device: DeviceSpec, kind: Arithmetic) -> float | None:
    """Return SMs x multiply-adds per SM and clock x 2 x clock, in operations/s.

    None if the device has no such unit, or if its clock is unknown.
    """
    chip = device.capability
    summing = chip.tensor_fma // 2 if device.half_rate else chip.tensor_fma
    per_sm: dict[Arithmetic, int] = {
        "fp32": chip.fp32_fma,
        "fp16": chip.fp16_fma,
        "dp4a": 4 * chip.dp4a,
        "tensor-fp16": summing,
        "tensor-fp16-16": chip.tensor_fma,
        "tensor-bf16": summing * chip.bf16,
        "tensor-int8": 2 * chip.tensor_fma * (chip.int8_tensor and chip.version != (10, 3)),  # not at that rate on 10.3
        "tensor-fp8": 2 * summing * chip.fp8,
    }
    clock = device.tensor_clock if kind.startswith("tensor") else device.clock
    return None if clock is None or not per_sm[kind] else device.sms * per_sm[kind] * 2 * clock
