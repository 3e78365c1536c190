"""Compute capabilities: properties that an architecture fixes for all its devices, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

Instruction = Literal["fma.rn.f32", "mma.sync", "wgmma", "tcgen05"]
Int8Unit = Literal["none", "dp4a", "tensor"]

_KIB = 1024
Release = tuple[int, int]  # major and minor version of torch


class UnsupportedCapability(ValueError):
    """Compute capability for which there are no kernels; the message lists the supported ones."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Compute capability: sizes in bytes, registers of 32 bits, rates in fused multiply-adds that one SM completes per
    clock.

    shared_optin     most shared memory of a block that asks for it; `shared_default` is the limit without asking
    shared_reserved  shared memory that the driver takes from each block
    fp16_fma         rate on the CUDA cores, with two numbers packed in a register where that is faster
    dp4a             rate of dp4a instructions, each four int8 multiply-adds; 0 where there are none or the tensor cores
                     do it
    tensor_fma       dense rate of tensor cores for fp16 summed in fp16; int8 and fp8 run at twice that. 0 without
                     tensor cores
    instruction      instruction to which Triton compiles `tl.dot` in half precision, if a block has at least
                     `instruction_rows` rows; with fewer rows it is mma.sync
    """

    major: int
    minor: int
    architecture: str
    threads_per_sm: int
    blocks_per_sm: int
    shared_per_sm: int
    shared_optin: int
    shared_reserved: int
    shared_granularity: int
    schedulers: int
    fp32_fma: int
    fp16_fma: int
    dp4a: int
    tensor_fma: int
    int8_tensor: bool
    bf16: bool
    fp8: bool
    instruction: Instruction
    instruction_rows: int
    registers_per_sm: int = 64 * _KIB
    registers_per_thread: int = 255
    register_granularity: int = 256  # registers are allocated to warps in multiples of this
    shared_default: int = 48 * _KIB
    threads_per_block: int = 1024
    warp: int = 32

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def version(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def int8_unit(self) -> Int8Unit:
        return "tensor" if self.int8_tensor else "dp4a" if self.dp4a else "none"

    @property
    def warps_per_sm(self) -> int:
        return self.threads_per_sm // self.warp

    @property
    def torch_builds(self) -> tuple[str, ...]:
        """CUDA builds of torch with machine code that runs on this capability: of the same major, and no higher minor,
        number.
        """
        return tuple(
            build
            for build, built_for in TORCH_BUILDS.items()
            if any(major == self.major and minor <= self.minor for major, minor in built_for)
        )

    @property
    def sources(self) -> Mapping[str, str]:
        """Source of the figure in each field of a compute capability, by field name: a guide, whitepaper or
        datasheet.
        """
        guide = dict.fromkeys((field.name for field in fields(self)), _GUIDE)
        return {**guide, **_SOURCES, **_SOURCES_OF.get(self.version, {}), "torch_builds": _MATRIX}


# Compute capabilities of each CUDA build of torch. The list of cu130 was also read out of torch 2.13. cu126 is the last
# build with 6.x and 7.0. It has no 9.0 here: the support matrix lists it, but the build script omits it since 2.11.
TORCH_BUILDS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "cu126": ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6)),
    "cu128": ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
    "cu130": ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
}

# First release of torch that has each build, and the first that no longer has it. PyTorch keeps cu126 in 2.14 as
# legacy, and plans to drop it in 2.15 (its issues 190355 and 190385).
TORCH_RELEASES: Mapping[str, tuple[Release, Release | None]] = {
    "cu126": ((2, 6), (2, 15)),
    "cu128": ((2, 7), (2, 12)),
    "cu130": ((2, 9), None),
}


def _capability(
    version: tuple[int, int],
    architecture: str,
    sm: tuple[int, int],
    shared_kib: tuple[int, int],
    lanes: tuple[int, int, int, int],
    dot: tuple[Instruction, int] = ("fma.rn.f32", 1),
) -> Capability:
    """Return one row of the table of capabilities.

    sm          (threads, blocks) per SM
    shared_kib  (per SM, most per block) in KiB
    lanes       rates (fp32, fp16, dp4a, tensor)
    dot         (instruction, fewest rows) of `tl.dot`
    """
    major, minor = version
    shared_per_sm, shared_optin = (kib * _KIB for kib in shared_kib)
    return Capability(
        *(major, minor, architecture, *sm, shared_per_sm, shared_optin),
        shared_reserved=_KIB if major >= 8 else 0,
        shared_granularity=128 if major >= 8 else 256,
        schedulers=2 if version == (6, 0) else 4,
        fp32_fma=lanes[0],
        fp16_fma=lanes[1],
        dp4a=lanes[2],
        tensor_fma=lanes[3],
        int8_tensor=version >= (7, 5),
        bf16=major >= 8,
        fp8=version >= (8, 9),
        instruction=dot[0],
        instruction_rows=dot[1],
    )


CAPABILITIES: Mapping[tuple[int, int], Capability] = {
    capability.version: capability
    for capability in (
        _capability((6, 0), "Pascal", (2048, 32), (64, 48), (64, 128, 0, 0)),
        _capability((6, 1), "Pascal", (2048, 32), (96, 48), (128, 2, 128, 0)),
        _capability((7, 0), "Volta", (2048, 32), (96, 96), (64, 128, 64, 512)),
        _capability((7, 5), "Turing", (1024, 16), (64, 64), (64, 128, 64, 512)),
        _capability((8, 0), "Ampere", (2048, 32), (164, 163), (64, 256, 0, 1024), ("mma.sync", 16)),
        _capability((8, 6), "Ampere", (1536, 16), (100, 99), (128, 128, 0, 512), ("mma.sync", 16)),
        _capability((8, 9), "Ada", (1536, 24), (100, 99), (128, 128, 0, 512), ("mma.sync", 16)),
        _capability((9, 0), "Hopper", (2048, 32), (228, 227), (128, 256, 0, 2048), ("wgmma", 64)),
        _capability((10, 0), "Blackwell", (2048, 32), (228, 227), (128, 256, 0, 4096), ("tcgen05", 64)),
        _capability((10, 3), "Blackwell", (2048, 32), (228, 227), (128, 256, 0, 4096), ("tcgen05", 64)),
        _capability((12, 0), "Blackwell", (1536, 24), (100, 99), (128, 128, 0, 512), ("mma.sync", 16)),
    )
}

_GUIDE = "CUDA Programming Guide 13.1 (6.x, 7.0: 12.9), Compute Capabilities"
_OCCUPANCY = "cuda_occupancy.h, CUDA 13.0"
_THROUGHPUT = "CUDA C++ Programming Guide 12.9, Throughput of Native Arithmetic Instructions"
_MATRIX = "PyTorch RELEASE.md, PyTorch CUDA Support Matrix, 2.10 to 2.14"
_TRITON = "PTX of Triton 3.9"
_SOURCES: Mapping[str, str] = {
    **dict.fromkeys(("shared_reserved", "shared_granularity", "schedulers", "register_granularity"), _OCCUPANCY),
    **dict.fromkeys(("fp32_fma", "fp16_fma"), _THROUGHPUT),
    **dict.fromkeys(("instruction", "instruction_rows"), _TRITON),
    "tensor_fma": "whitepaper of the architecture: its peak over SMs and clock",
    "dp4a": "PTX ISA, dp4a: 6.1 and later; 0 where tensor cores take int8",
}
_UNCERTAIN_DP4A = "uncertain: as many as the SM has integer lanes (whitepaper of the architecture)"
_GA10X = "NVIDIA Ampere GA102 whitepaper, Peak FP16 (non-tensor); the Programming Guide says 256"
_DERIVED_TENSOR = "uncertain: NVIDIA Blackwell Architecture Technical Brief, twice Hopper's per SM; no clock is given"
_SOURCES_OF: Mapping[tuple[int, int], Mapping[str, str]] = {
    (6, 1): {"dp4a": "Tesla P40 datasheet: 47 TOP/s over 30 SMs at 1531 MHz"},
    (7, 0): {"dp4a": _UNCERTAIN_DP4A},
    (7, 5): {"dp4a": _UNCERTAIN_DP4A},
    (8, 6): {"fp16_fma": _GA10X},
    (10, 0): {"tensor_fma": _DERIVED_TENSOR, "fp16_fma": "uncertain: as Hopper"},
    (10, 3): {"tensor_fma": _DERIVED_TENSOR, "fp16_fma": "uncertain: as Hopper"},
    (12, 0): {"fp16_fma": "NVIDIA RTX Blackwell whitepaper: FP16 (non-tensor) as FP32"},
}


def capability_of(major: int, minor: int) -> tuple[Capability, str]:
    """Return the capability, and "" or a note that a lower one is used in its place.

    Raises UnsupportedCapability below 6.0.
    """
    lower = [version for version in CAPABILITIES if version <= (major, minor)]
    if not lower:
        supported = ", ".join(map(str, CAPABILITIES.values()))
        raise UnsupportedCapability(f"compute capability: {major}.{minor} has no kernels; expected one of {supported}")
    found = CAPABILITIES[max(lower)]
    exact = found.version == (major, minor)
    return found, "" if exact else f"compute capability {major}.{minor} is not in the table: taken as {found}"
