"""A device: how many SMs it has, how fast they are, how much memory there is, and who says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .compute_capability import Capability

__all__ = ["ARITHMETIC", "Arithmetic", "DeviceSpec", "computed_rate"]

# fp32, fp16: multiply-adds of the SM's lanes. dp4a: int8 by fours. tensor-*: tensor cores, summing in fp32 (int8:
# int32); tensor-fp16-16 sums in fp16.
Arithmetic = Literal[
    "fp32", "fp16", "dp4a", "tensor-fp16", "tensor-fp16-16", "tensor-bf16", "tensor-int8", "tensor-fp8"
]
ARITHMETIC: tuple[Arithmetic, ...] = (
    *("fp32", "fp16", "dp4a"),
    *("tensor-fp16", "tensor-fp16-16", "tensor-bf16", "tensor-int8", "tensor-fp8"),
)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Bytes, bytes/s, operations/s (a multiply-add is two), Hz; dense, never with sparsity.

    rates      what is absent the device cannot do, or nobody has said how fast it does it
    published  those of the rates that NVIDIA printed; the others are SMs x multiply-adds x 2 x clock
    sources    field, or arithmetic -> where its figure is from; "uncertain" in it says what it says
    """

    name: str
    capability: Capability
    sms: int
    memory: int
    bandwidth: float
    l2: int | None
    clock: float | None
    tensor_clock: float | None
    half_rate: bool  # tensor cores sum in fp32 at half the rate that they sum in fp16 at
    published: Mapping[Arithmetic, float]
    sources: Mapping[str, str]
    names: tuple[str, ...] = ()  # as torch says them
    rates: Mapping[Arithmetic, float] = field(init=False)

    def __post_init__(self) -> None:
        known = {kind: self.published.get(kind) or computed_rate(self, kind) for kind in ARITHMETIC}
        object.__setattr__(self, "rates", {kind: rate for kind, rate in known.items() if rate})

    def source(self, figure: str) -> str:
        """Where a field's or a rate's figure is from. Raises KeyError for what is not a figure of this device."""
        if figure in self.rates and figure not in self.published:
            clock = self.tensor_clock if figure.startswith("tensor") else self.clock
            return f"computed: {self.sms} SMs x multiply-adds per SM x 2 x {(clock or 0) / 1e6:.0f} MHz"
        return self.sources[figure]

    def scaled(self, sms: int) -> DeviceSpec:
        """The same with another number of SMs, and its share of the rates and of the bandwidth."""
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
    """SMs x multiply-adds per SM and clock x 2 x clock; None without such a unit, or where no clock is known."""
    chip = device.capability
    summing = chip.tensor_fma // 2 if device.half_rate else chip.tensor_fma
    per_sm: dict[Arithmetic, int] = {
        "fp32": chip.fp32_fma,
        "fp16": chip.fp16_fma,
        "dp4a": 4 * chip.dp4a,
        "tensor-fp16": summing,
        "tensor-fp16-16": chip.tensor_fma,
        "tensor-bf16": summing * chip.bf16,
        "tensor-int8": 2 * chip.tensor_fma * (chip.int8_tensor and chip.version != (10, 3)),  # 10.3: not at that rate
        "tensor-fp8": 2 * summing * chip.fp8,
    }
    clock = device.tensor_clock if kind.startswith("tensor") else device.clock
    return None if clock is None or not per_sm[kind] else device.sms * per_sm[kind] * 2 * clock
