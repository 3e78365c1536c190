"""Precision policies: in which dtype a compute capability stores, multiplies and adds, on which unit, and why.

They are derived from the tables of capabilities and devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from typing import Literal

from .compute_capability import Capability, capability_of
from .device_spec import Arithmetic, DeviceSpec
from .device_table import DEVICES

TCGEN05_INT8 = (3, 8)  # older versions of Triton compile int8 products to mma.sync on 10.0

GEMV_ROWS = 8  # rows that share one read of int4 weights, on CUDA cores
GEMM_ROWS = 64  # most rows for which int4 weights are multiplied on tensor cores

Half = Literal["fp16", "bf16"]
Accumulate = Literal["fp32", "fp16 within a group, fp32 across"]


@dataclass(frozen=True, slots=True)
class ComputeUnit:
    """Unit that a product runs on: its arithmetic, the library whose kernel computes it, and the instruction of the
    product.
    """

    arithmetic: Arithmetic
    through: Literal["Triton", "cuBLAS"]
    instruction: str

    @property
    def ptx(self) -> str:
        """Full name of the instruction in the PTX of a Triton kernel; "*" stands for any size."""
        return _PTX.get((self.instruction, self.arithmetic), self.instruction)

    def of_rows(self, rows: int, capability: Capability) -> ComputeUnit:
        """Return the unit for a product of so many rows: mma.sync where they are too few for the capability's
        instruction.
        """
        return replace(self, instruction="mma.sync") if rows < capability.instruction_rows else self


_PTX: Mapping[tuple[str, str], str] = {
    ("fma.rn.f32", "fp32"): "fma.rn.f32*",  # also matches .f32x2
    ("mma.sync", "tensor-bf16"): "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    ("mma.sync", "tensor-int8"): "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",
    ("mma.sync", "tensor-fp8"): "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    ("wgmma", "tensor-bf16"): "wgmma.mma_async.sync.aligned.m64n*k16.f32.bf16.bf16",
    ("wgmma", "tensor-int8"): "wgmma.mma_async.sync.aligned.m64n*k32.s32.s8.s8",
    ("wgmma", "tensor-fp8"): "wgmma.mma_async.sync.aligned.m64n*k32.f32.e4m3.e4m3",
    ("tcgen05", "tensor-bf16"): "tcgen05.mma.cta_group::1.kind::f16",
    ("tcgen05", "tensor-int8"): "tcgen05.mma.cta_group::1.kind::i8",
    ("tcgen05", "tensor-fp8"): "tcgen05.mma.cta_group::1.kind::f8f6f4",
}


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Precision policy of one compute capability.

    The figures in the reasons are those of the first device of the capability in the table.

    storage    dtype of activations and KV
    compute    dtype in which products are computed
    prefill    unit for linear layers with many rows; int4 weights are first dequantized in full, to `compute`
    decode     unit for linear layers with few rows
    int8, fp8  units for 8-bit activations; None: not worth it on this capability
    attention  "per head": one program for each query head, on CUDA cores; "packed GQA": the query heads that share a KV
               head are the rows of one tensor core product
    pipelined  whether loads may run ahead of the arithmetic (num_stages above 1)
    reasons    name of a field above -> the reason for it
    note       "", or a note that another capability's policy is used
    """

    capability: Capability
    storage: Half
    compute: Literal["fp16", "fp32", "bf16"]
    accumulate: Accumulate
    prefill: ComputeUnit
    decode: ComputeUnit
    int8: ComputeUnit | None
    fp8: ComputeUnit | None
    attention: Literal["per head", "packed GQA"]
    attention_unit: ComputeUnit
    pipelined: bool
    reasons: Mapping[str, str]
    note: str = ""

    @property
    def int8_units(self) -> tuple[ComputeUnit, ...]:
        """Units for layers with int8 weights.

        Beside dp4a these may be cuBLAS's tensor cores, for many rows, with weights dequantized in full.
        """
        if self.int8 is None:
            return ()
        beside = self.int8.arithmetic == "dp4a" and self.prefill.arithmetic == "tensor-fp16"
        return (self.int8, self.prefill) if beside else (self.int8,)

    def max_stages(self, stage_bytes: int) -> int:
        """Number of stages of `stage_bytes` of shared memory that a block may have; 1 where nothing is pipelined."""
        return max(1, self.capability.shared_optin // stage_bytes) if self.pipelined else 1


_FP32 = ComputeUnit("fp32", "Triton", "fma.rn.f32")
_FP16 = ComputeUnit("fp16", "Triton", "fma.rn.f16x2")


@cache
def policy_of(major: int, minor: int) -> PrecisionPolicy:
    """Return the precision policy of a compute capability; an unknown one gets the policy of the next lower one.

    Raises UnsupportedCapability below 6.0.
    """
    chip, note = capability_of(major, minor)
    device = next(device for device in DEVICES if device.capability is chip)
    storage, storage_why = _storage(chip)
    prefill, decode, paths_why = _paths(chip, device)
    int8, int8_why = _int8(chip, device)
    fp8, fp8_why = _fp8(chip, device)
    lanes_in_fp16 = decode.arithmetic == "fp16"
    return PrecisionPolicy(
        capability=chip,
        storage=storage,
        compute="fp32" if prefill.arithmetic == "fp32" else storage,
        accumulate="fp16 within a group, fp32 across" if lanes_in_fp16 else "fp32",
        prefill=prefill,
        decode=decode,
        int8=int8,
        fp8=fp8,
        attention="packed GQA" if chip.bf16 else "per head",
        attention_unit=decode if chip.bf16 else _FP32,
        pipelined=chip.major >= 8,
        reasons={
            "storage": storage_why,
            **paths_why,
            "accumulate": "fma.rn.f16x2 rounds every sum to 11 bits: only a group's few products may be summed in it"
            if lanes_in_fp16
            else "sums over thousands of products lose in 11 or 8 bits what int4 weights still hold",
            "int8": int8_why,
            "fp8": fp8_why,
            "attention": f"tl.dot is {chip.instruction}: the heads that share keys fill its rows"
            if chip.bf16
            else "tl.dot is fma.rn.f32: packing heads as rows saves nothing and costs registers; sums stay in fp32",
            "pipelined": f"cp.async copies into shared memory, {chip.shared_optin // 1024} KiB a block"
            if chip.major >= 8
            else "no cp.async below 8.0: a stage ahead would wait in registers",
        },
        note=note,
    )


def _storage(chip: Capability) -> tuple[Half, str]:
    if chip.bf16:
        return "bf16", f"{chip} multiplies bf16, which has the range of the models' own weights"
    return "fp16", f"no bf16 arithmetic below 8.0 ({chip}): fp16, with overflow looked for"


def _paths(chip: Capability, device: DeviceSpec) -> tuple[ComputeUnit, ComputeUnit, dict[str, str]]:
    """Return the units of prefill and decode, and the reasons for both and for "compute"."""
    if chip.bf16:
        decode, prefill = (ComputeUnit("tensor-bf16", through, chip.instruction) for through in ("Triton", "cuBLAS"))
        why = f"tensor cores: {_compare_rates(device, 'tensor-bf16', 'fp32')}"
        rows = f" where weights are {chip.instruction_rows} rows of the product, else mma.sync"
        bound = (
            f"{_intensity_text(device, 'tensor-bf16')} before arithmetic, not {_bandwidth_text(device)}, sets the time"
        )
        return prefill, decode, {
            "compute": why,
            "prefill": f"above {GEMM_ROWS} rows int4 weights are written out for cuBLAS; {why}",
            "decode": f"{chip.instruction}{rows if chip.instruction != 'mma.sync' else ''}; {bound}",
        }  # fmt: skip
    if chip.tensor_fma:
        why = f"{_compare_rates(device, 'tensor-fp16', 'fp32')}, but Triton's tl.dot is fma.rn.f32 below 8.0"
        bound = (
            f"{_intensity_text(device, 'fp32')} before fp32 arithmetic, not {_bandwidth_text(device)}, sets the time"
        )
        prefill = ComputeUnit("tensor-fp16", "cuBLAS", "mma.sync")
        return prefill, _FP32, {"compute": why, "prefill": f"cuBLAS on tensor cores: {why}", "decode": f"FMA: {bound}"}
    why = f"no tensor cores; {_compare_rates(device, 'fp16', 'fp32')}"
    decode = _FP16 if device.rates["fp16"] > device.rates["fp32"] else _FP32
    prefill = replace(decode, through="cuBLAS")
    many = f"of many rows int4 weights are written out in {decode.arithmetic} for cuBLAS; {why}"
    if decode.arithmetic == "fp16":
        many += "; torch has it sum in fp32, at a rate that no card here has shown"
    return prefill, decode, {"compute": why, "prefill": many, "decode": why}


def _int8(chip: Capability, device: DeviceSpec) -> tuple[ComputeUnit | None, str]:
    if chip.int8_unit == "none":
        return None, f"{chip} has no dp4a (6.1 and later) and no tensor cores"
    if not chip.bf16:
        why = f"{_compare_rates(device, 'dp4a', 'fp32')}, as inline PTX"
        if chip.tensor_fma:
            why += f", for few rows: tensor-fp16 {_rate_text(device, 'tensor-fp16')} for many, of weights written out"
        if chip.int8_tensor:
            why += f" (tensor-int8 {_rate_text(device, 'tensor-int8')}, but Triton compiles no int8 dot below 8.0)"
        return ComputeUnit("dp4a", "Triton", "dp4a.s32.s32"), why
    why = _compare_rates(device, "tensor-int8", "tensor-bf16")
    if device.rates["tensor-int8"] <= device.rates["tensor-bf16"]:
        return None, f"{why}: slower than bf16 (tcgen05 has no int8 on {chip}, mma.sync only)"
    if chip.instruction == "tcgen05" and not triton_has(TCGEN05_INT8):
        return ComputeUnit(
            "tensor-int8", "Triton", "mma.sync"
        ), f"{why}; tcgen05 from Triton {TCGEN05_INT8[0]}.{TCGEN05_INT8[1]}"
    return ComputeUnit("tensor-int8", "Triton", chip.instruction), why


def triton_has(version: tuple[int, int]) -> bool:
    """Return whether the installed Triton has at least this version; True where Triton is not installed."""
    installed = installed_triton()
    return installed is None or installed >= version


@cache
def installed_triton() -> tuple[int, int] | None:
    """Return the major and minor version of the installed Triton; None if it is not installed."""
    try:
        major, minor, *_ = metadata.version("triton").split(".")
    except metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def _fp8(chip: Capability, device: DeviceSpec) -> tuple[ComputeUnit | None, str]:
    if not chip.fp8:
        return None, f"tensor cores take fp8 from 8.9; this is {chip}"
    return ComputeUnit("tensor-fp8", "Triton", chip.instruction), _compare_rates(device, "tensor-fp8", "tensor-bf16")


def _rate_text(device: DeviceSpec, kind: Arithmetic) -> str:
    rate = device.rates[kind] / 1e12
    unit = "TOP/s" if kind in ("dp4a", "tensor-int8") else "TFLOP/s"
    return f"{rate:.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}"


def _compare_rates(device: DeviceSpec, one: Arithmetic, other: Arithmetic) -> str:
    ratio = device.rates[one] / device.rates[other]
    times = f"{ratio:.3g} times" if ratio >= 1 else f"1/{1 / ratio:.0f} of"
    return f"{device.name}: {one} {_rate_text(device, one)}, {times} {other}'s {_rate_text(device, other)}"


def _bandwidth_text(device: DeviceSpec) -> str:
    return f"{device.bandwidth / 1e9:.0f} GB/s"


def _intensity_text(device: DeviceSpec, kind: Arithmetic) -> str:
    """Text with the number of rows at which multiplying int4 weights takes as long as reading them.

    There are 4 operations per row and byte.
    """
    return f"{device.name}: some {device.rates[kind] / device.bandwidth / 4:.0f} rows of int4 weights"
