"""The least time that an operator can take on a device: arithmetic on the tables, not a measurement.

Operations over the rate of the unit that does them, or bytes over bandwidth, whichever is more (Williams, Waterman
and Patterson, "Roofline", CACM 52(4), 2009). Every byte is moved once; launches, caches and tails cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .devices import Arithmetic, Device
from .precision import PrecisionPolicy, Unit, policy_of

__all__ = [
    "DecodeAttention",
    "Elementwise",
    "Linear",
    "Op",
    "Prediction",
    "PrefillAttention",
    "half_precision_ratio",
    "roofline",
]

_HALF = 2  # bytes of fp16 and bf16


@dataclass(frozen=True, slots=True)
class Linear:
    """y [m, n] = x [m, k] @ w.T; w of `bits`, below 16 with a scale of two bytes and a zero point per group.

    Of 32 bits where the policy computes in fp32: what is held then is read so.

    activations "int8" or "fp8": x is quantised too, a byte each, and multiplied as such.
    """

    m: int
    n: int
    k: int
    bits: Literal[4, 8, 16, 32] = 4
    group: int = 128
    activations: Literal["half", "int8", "fp8"] = "half"

    @property
    def operations(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        groups = 0 if self.bits >= 16 else self.n * -(-self.k // self.group)
        weights = self.n * self.k * self.bits / 8 + groups * (_HALF + self.bits / 8)
        x = self.m * self.k * (_HALF if self.activations == "half" else 1)
        return weights + x + self.m * self.n * _HALF

    def bytes_through(self, unit: Unit) -> float:
        """cuBLAS takes dequantised weights: they are written and read once more, in two bytes each."""
        again = unit.through == "cuBLAS" and self.bits < 16
        return self.bytes + (2 * _HALF * self.n * self.k if again else 0)


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Causal attention of `new` tokens, after `cached` ones, in each of `batch` sequences."""

    batch: int
    new: int
    heads: int
    kv_heads: int
    head_dim: int
    cached: int = 0
    kv_bytes: int = _HALF

    @property
    def operations(self) -> int:
        pairs = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * self.batch * self.heads * self.head_dim * pairs

    @property
    def bytes(self) -> float:
        kv = 2 * (self.cached + self.new) * self.kv_heads * self.kv_bytes
        return self.batch * self.head_dim * (kv + 2 * self.new * self.heads * _HALF)


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Attention of one new token over `context` cached ones, itself among them, in each of `batch` sequences."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: int = _HALF

    @property
    def operations(self) -> int:
        return 4 * self.batch * self.heads * self.head_dim * self.context

    @property
    def bytes(self) -> float:
        return self.batch * self.head_dim * 2 * (self.context * self.kv_heads * self.kv_bytes + self.heads * _HALF)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Anything that is only read and written: norms, rotary, activations."""

    bytes: float
    operations: int = 0


Op = Linear | PrefillAttention | DecodeAttention | Elementwise


@dataclass(frozen=True, slots=True)
class Prediction:
    """seconds: the more of the two; bound_by: "bandwidth", or the arithmetic; unit: who does it."""

    seconds: float
    bound_by: Literal["bandwidth"] | Arithmetic
    arithmetic_s: float
    bandwidth_s: float
    unit: Unit
    source: Literal["computed"] = "computed"


def roofline(device: Device, op: Op, arithmetic: Arithmetic | None = None) -> Prediction:
    """By the precision policy of the device, or in the `arithmetic` that is named, by one kernel.

    A linear layer takes whichever of the policy's two units is faster for its rows. Raises ValueError for
    arithmetic that the device lacks or the policy refuses.
    """
    policy = policy_of(*device.capability.version)
    units = [Unit(arithmetic, "Triton", "")] if arithmetic else _units(policy, op)
    for unit in units:
        if unit.arithmetic not in device.rates:
            raise ValueError(f"arithmetic: {device.name} has no {unit.arithmetic}; expected one of {[*device.rates]}")
    return min((_predict(device, op, unit) for unit in units), key=lambda prediction: prediction.seconds)


def half_precision_ratio(device: Device, op: Op) -> float:
    """How many times longer `op` takes with every multiply-add on the lanes in fp16 than by the policy."""
    return roofline(device, op, "fp16").seconds / roofline(device, op).seconds


def _units(policy: PrecisionPolicy, op: Op) -> list[Unit]:
    if isinstance(op, Elementwise):
        return [Unit("fp32", "Triton", "fma.rn.f32")]
    if not isinstance(op, Linear):
        return [policy.attention_unit]
    if op.activations == "half":
        return [policy.decode, policy.prefill]
    unit = policy.int8 if op.activations == "int8" else policy.fp8
    if unit is None:
        why = policy.reasons[op.activations]
        raise ValueError(f"activations: {op.activations} is not used on {policy.capability}: {why}")
    return [unit]


def _predict(device: Device, op: Op, unit: Unit) -> Prediction:
    moved = op.bytes_through(unit) if isinstance(op, Linear) else op.bytes
    arithmetic_s = op.operations / device.rates[unit.arithmetic]
    bandwidth_s = moved / device.bandwidth
    if arithmetic_s > bandwidth_s:
        return Prediction(arithmetic_s, unit.arithmetic, arithmetic_s, bandwidth_s, unit)
    return Prediction(bandwidth_s, "bandwidth", arithmetic_s, bandwidth_s, unit)
