"""Roofline model: the least time that an operator can take on a device, computed from the tables, not measured.

It is the operations over the rate of the unit that computes them, or the bytes over the bandwidth, whichever is more
(Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009). Every byte is moved once; launches, caches and tail
effects cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .device_spec import Arithmetic, DeviceSpec
from .precision import GEMM_ROWS, GEMV_ROWS, ComputeUnit, PrecisionPolicy, policy_of

_HALF = 2  # bytes of an fp16 or bf16 number


@dataclass(frozen=True, slots=True)
class LinearWork:
    """Work of a linear layer y [m, n] = x [m, k] @ w.T.

    Weights have `bits`; below 16 they also have a scale of two bytes and a zero point per group. They have 32 bits
    where the policy computes in fp32, since they are then held and read so.

    activations  "int8" or "fp8": x is quantized as well, to a byte each, and multiplied as such
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
    def weight_bytes(self) -> float:
        groups = 0 if self.bits >= 16 else self.n * -(-self.k // self.group)
        return self.n * self.k * self.bits / 8 + groups * (_HALF + self.bits / 8)

    @property
    def bytes(self) -> float:
        x = self.m * self.k * (_HALF if self.activations == "half" else 1)
        return self.weight_bytes + x + self.m * self.n * _HALF

    def bytes_through(self, unit: ComputeUnit) -> float:
        """Bytes that the kernels of a unit move.

        cuBLAS takes no quantized weights: they are dequantized in full to the dtype that it multiplies, and read once
        more. On CUDA cores int4 weights are read again for every eight rows.
        """
        if unit.through == "cuBLAS":
            width = 4 if unit.arithmetic == "fp32" else _HALF
            return self.bytes + (2 * width * self.n * self.k if self.bits < 16 else 0)
        lots = -(-self.m // GEMV_ROWS) if self.bits == 4 and unit.arithmetic in ("fp32", "fp16") else 1
        return self.bytes + (lots - 1) * self.weight_bytes


@dataclass(frozen=True, slots=True)
class PrefillAttentionWork:
    """Work of causal attention of `new` tokens, after `cached` ones, in each of `batch` sequences."""

    batch: int
    new: int
    heads: int
    kv_heads: int
    head_dim: int
    cached: int = 0
    kv_bytes: float = _HALF

    @property
    def operations(self) -> int:
        pairs = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * self.batch * self.heads * self.head_dim * pairs

    @property
    def bytes(self) -> float:
        kv = 2 * (self.cached + self.new) * self.kv_heads * self.kv_bytes
        return self.batch * self.head_dim * (kv + 2 * self.new * self.heads * _HALF)


@dataclass(frozen=True, slots=True)
class DecodeAttentionWork:
    """Work of attention of one new token over `context` tokens, itself included, in each of `batch` sequences."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: float = _HALF

    @property
    def operations(self) -> int:
        return 4 * self.batch * self.heads * self.head_dim * self.context

    @property
    def bytes(self) -> float:
        return self.batch * self.head_dim * 2 * (self.context * self.kv_heads * self.kv_bytes + self.heads * _HALF)


@dataclass(frozen=True, slots=True)
class ElementwiseWork:
    """Work of operators that mainly read and write: norms, rotary embedding, activations."""

    bytes: float
    operations: int = 0


OperationWork = LinearWork | PrefillAttentionWork | DecodeAttentionWork | ElementwiseWork


@dataclass(frozen=True, slots=True)
class RooflinePrediction:
    """Prediction of the roofline model.

    seconds   the larger of `arithmetic_s` and `bandwidth_s`
    bound_by  "bandwidth", or the arithmetic
    unit      unit that computes it
    """

    seconds: float
    bound_by: Literal["bandwidth"] | Arithmetic
    arithmetic_s: float
    bandwidth_s: float
    unit: ComputeUnit
    source: Literal["computed"] = "computed"


def roofline(device: DeviceSpec, op: OperationWork, arithmetic: Arithmetic | None = None) -> RooflinePrediction:
    """Return the prediction for an operator, by the device's precision policy, or by one kernel in `arithmetic`.

    For a linear layer it is the fastest of the policy's units that have a kernel for its rows. Raises ValueError for
    arithmetic that the device lacks or the policy refuses.
    """
    policy = policy_of(*device.capability.version)
    units = [ComputeUnit(arithmetic, "Triton", "")] if arithmetic else _units(policy, op)
    for unit in units:
        if unit.arithmetic not in device.rates:
            raise ValueError(f"arithmetic: {device.name} has no {unit.arithmetic}; expected one of {[*device.rates]}")
    return min((predict_on_unit(device, op, unit) for unit in units), key=lambda prediction: prediction.seconds)


def half_precision_ratio(device: DeviceSpec, op: OperationWork) -> float:
    """Ratio of the time of `op` with every multiply-add in fp16 on CUDA cores to its time by the policy."""
    return roofline(device, op, "fp16").seconds / roofline(device, op).seconds


def _units(policy: PrecisionPolicy, op: OperationWork) -> list[ComputeUnit]:
    if isinstance(op, ElementwiseWork):
        return [ComputeUnit("fp32", "Triton", "fma.rn.f32")]
    if not isinstance(op, LinearWork):
        return [policy.attention_unit]
    if op.activations == "half":
        return _half_units(policy, op)
    units = policy.int8_units if op.activations == "int8" else (policy.fp8,) if policy.fp8 else ()
    if not units:
        why = policy.reasons[op.activations]
        raise ValueError(f"activations: compute capability {policy.capability} does not use {op.activations}: {why}")
    return [*units]


def _half_units(policy: PrecisionPolicy, op: LinearWork) -> list[ComputeUnit]:
    """Return the units for half-precision activations.

    torch multiplies dense weights; tensor cores read int4 weights without dequantizing them first for up to GEMM_ROWS
    rows.
    """
    if op.bits >= 16:
        return [policy.prefill]
    if policy.capability.bf16 and op.bits == 4:
        return [policy.decode if op.m <= GEMM_ROWS else policy.prefill]
    return [policy.prefill, policy.decode]


def predict_on_unit(device: DeviceSpec, op: OperationWork, unit: ComputeUnit) -> RooflinePrediction:
    """Return the prediction for a given unit, whether or not the policy would choose it."""
    moved = op.bytes_through(unit) if isinstance(op, LinearWork) else op.bytes
    arithmetic_s = op.operations / device.rates[unit.arithmetic]
    bandwidth_s = moved / device.bandwidth
    if arithmetic_s > bandwidth_s:
        return RooflinePrediction(arithmetic_s, unit.arithmetic, arithmetic_s, bandwidth_s, unit)
    return RooflinePrediction(bandwidth_s, "bandwidth", arithmetic_s, bandwidth_s, unit)
