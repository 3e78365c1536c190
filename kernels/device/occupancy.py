"""Occupancy: how many blocks of a kernel fit on an SM at once, by the rules of NVIDIA's occupancy calculator.

The rules are those of cuda_occupancy.h (CUDA 13.0), with which the tests compare: registers are allocated to whole
warps, within each scheduler's share of the register file; shared memory is allocated to whole blocks, in steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .compute_capability import Capability

Limit = Literal["warps", "blocks", "registers", "shared memory"]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupancy of one SM.

    `limits` lists the resources that allow no more blocks than these, usually one; with 0 blocks, those that are
    exceeded.
    """

    blocks: int
    warps: int
    fraction: float
    limits: tuple[Limit, ...]


def occupancy(chip: Capability, threads: int, registers: int, shared: int) -> Occupancy:
    """Return the occupancy of a kernel on a chip; a kernel that cannot run on it has 0 blocks.

    threads    per block
    registers  per thread
    shared     bytes of shared memory per block, without the driver's own

    Raises ValueError for numbers that no kernel has.
    """
    for what, value, minimum in (("threads", threads, 1), ("registers", registers, 0), ("shared", shared, 0)):
        if value < minimum:
            raise ValueError(f"{what}: {value} per block or thread; expected at least {minimum}")
    warps = -(-threads // chip.warp)
    allowed: dict[Limit, int] = {
        "warps": chip.warps_per_sm // warps if threads <= chip.threads_per_block else 0,
        "blocks": chip.blocks_per_sm,
        "registers": _by_registers(chip, warps, registers),
        "shared memory": _by_shared(chip, shared),
    }
    blocks = min(allowed.values())
    limits = tuple(what for what, fitting in allowed.items() if fitting == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / chip.warps_per_sm, limits)


def _by_registers(chip: Capability, warps: int, registers: int) -> int:
    if registers == 0:
        return chip.blocks_per_sm
    if registers > chip.registers_per_thread:
        return 0
    per_warp = _round_up(registers * chip.warp, chip.register_granularity)

    def blocks(schedulers: int) -> int:
        return chip.registers_per_sm // schedulers // per_warp * schedulers // warps

    # 6.0 rejects kernels that would not fit 6.1, with its four schedulers, although they would fit its own two.
    return blocks(chip.schedulers) if blocks(4) else 0


def _by_shared(chip: Capability, shared: int) -> int:
    per_block = _round_up(shared + chip.shared_reserved, chip.shared_granularity)
    if per_block == 0:
        return chip.blocks_per_sm
    if per_block > chip.shared_optin + chip.shared_reserved:
        return 0
    return chip.shared_per_sm // per_block


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
