"""Configs chosen with no GPU: by what the compiler says each would use, and the roofline of a device. Nothing is run.

A config's time is predicted as the roofline's, over two things that keep a device from reaching it: SMs that idle in
the last wave of blocks, and too few resident warps to cover the latency of memory; plus what is written and read
again where a kernel is in parts, and the launches. A prediction ranks configs; it is no measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .aot import Compiled
from .devices import Device
from .occupancy import occupancy
from .operation import Launch, Operation, Shape
from .precision import PrecisionPolicy
from .roofline import roofline
from .variant import Config

__all__ = ["LAUNCH_S", "Candidate", "fault", "predict"]

LAUNCH_S = 2e-6  # from one kernel to the next in a CUDA graph: some 2 us on every card
COVERING_WARPS = 16  # of an SM: what loads in flight need to hide memory, as a rule of thumb


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config, and what became of each of its launches."""

    config: Config
    launches: tuple[tuple[Launch, Compiled], ...]


def fault(policy: PrecisionPolicy, launch: Launch, compiled: Compiled) -> str:
    """Why a kernel must not be used as compiled; empty if nothing is wrong with it."""
    chip = policy.capability
    if compiled.spilled:
        return f"spills {compiled.spilled} bytes a thread"
    if compiled.shared > chip.shared_optin:
        return f"{compiled.shared} bytes of shared memory, of {chip.shared_optin}"
    if not occupancy(chip, compiled.threads, compiled.registers, compiled.shared).blocks:
        return f"no block fits an SM: {compiled.threads} threads of {compiled.registers} registers"
    if chip.version == (6, 1) and compiled.half_arithmetic():
        return f"half-precision arithmetic, at a 64th of the rate: {dict(compiled.half_arithmetic())}"
    if launch.instruction and not any(name.startswith(launch.instruction) for name in compiled.mix()):
        return f"no {launch.instruction}"
    return ""


def predict(device: Device, policy: PrecisionPolicy, operation: Operation, shape: Shape, candidate: Candidate) -> float:
    """Seconds, by arithmetic alone; infinite where a launch is at fault."""
    if any(fault(policy, launch, compiled) for launch, compiled in candidate.launches):
        return math.inf
    work = operation.work(policy, shape)
    least = roofline(device, work).seconds
    launch, compiled = candidate.launches[0]
    room = occupancy(policy.capability, compiled.threads, compiled.registers, compiled.shared)
    blocks = math.prod(launch.grid)
    waves = blocks / (device.sms * room.blocks)
    resident = min(room.warps, math.ceil(blocks / device.sms) * compiled.threads // 32)
    used = waves / math.ceil(waves) if waves > 1 else min(1.0, blocks / device.sms)
    covered = min(1.0, resident / COVERING_WARPS)
    moved = sum(launch.moved for launch, _ in candidate.launches)
    return least / (used * covered) + moved / device.bandwidth + LAUNCH_S * len(candidate.launches)
