"""Static choice of configs without a GPU, from compiled resources and the roofline of a device; nothing is run.

A config's time is predicted as the roofline's, or as the time that the schedulers need to issue the loop around its
multiply-adds if that is more. It is divided by two factors that keep a device from reaching it: idle SMs in the last
wave of blocks, and too few resident warps to cover the latency of memory. Added are the bytes that are written and read
again where a kernel is in parts, and the launches. A prediction ranks configs; it is no measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..compiler.aot import CompiledKernel
from ..device.device_spec import DeviceSpec
from ..device.device_table import DEVICES
from ..device.occupancy import occupancy
from ..device.precision import PrecisionPolicy
from ..device.roofline import OperationWork, roofline
from ..launch.kernel_operation import KernelLaunch, KernelOperation, ProblemShape, main_launch_index
from ..launch.variant import Config

LAUNCH_S = 2e-6  # from one kernel to the next in a CUDA graph: about 2 us on every card
COVERING_WARPS = 16  # warps per SM whose loads hide the latency of memory, as a rule of thumb
# Multiply-adds of one thread's instruction. .f32x2 (from 10.0) completes as many per clock as two instructions, but is
# issued as one.
_MULTIPLY_ADDS = {"fma.rn.f32": 1, "fma.rn.f32x2": 2, "fma.rn.f16x2": 2, "dp4a.s32.s32": 4}
_MATRIX = ("mma.", "wgmma.", "tcgen05.")


@dataclass(frozen=True, slots=True)
class ConfigCandidate:
    """Config with the compiled kernel of each of its launches."""

    config: Config
    launches: tuple[tuple[KernelLaunch, CompiledKernel], ...]

    @property
    def main(self) -> tuple[KernelLaunch, CompiledKernel]:
        """Launch by which an operator's config is chosen, and its compiled kernel."""
        return self.launches[main_launch_index([launch for launch, _ in self.launches])]


def reference_device(policy: PrecisionPolicy) -> DeviceSpec:
    """Return the device whose roofline is used for a capability: its first one in the table."""
    return next(device for device in DEVICES if device.capability is policy.capability)


def static_facts(candidate: ConfigCandidate, seconds: float) -> dict[str, object]:
    """Return the facts of a static table's entry; `seconds` is the result of `predict_seconds`."""
    _, compiled = candidate.main
    return {"registers": compiled.registers, "shared": compiled.shared, "predicted_us": round(seconds * 1e6, 1)}


def find_fault(policy: PrecisionPolicy, launch: KernelLaunch, compiled: CompiledKernel) -> str:
    """Return why a kernel must not be used as compiled; empty if nothing is wrong with it."""
    chip = policy.capability
    if compiled.spilled:
        return f"spills {compiled.spilled} bytes a thread"
    if compiled.shared > chip.shared_optin:
        return f"{compiled.shared} bytes of shared memory, of {chip.shared_optin}"
    if not occupancy(chip, compiled.threads, compiled.registers, compiled.shared).blocks:
        return f"no block fits an SM: {compiled.threads} threads of {compiled.registers} registers"
    if chip.version == (6, 1) and compiled.half_arithmetic():
        return f"half-precision arithmetic, at a 64th of the rate: {dict(compiled.half_arithmetic())}"
    return _product_fault(launch, compiled) if launch.instruction else ""


def _product_fault(launch: KernelLaunch, compiled: CompiledKernel) -> str:
    """Return what is wrong with the inner loops' product instructions; empty if nothing.

    Only inner loops count: code that runs once says nothing about code that runs for each step of K.
    """
    loops = compiled.inner_loops()[: launch.loops]
    products = [sum(count for name, count in loop.items() if fnmatchcase(name, launch.instruction)) for loop in loops]
    if len(loops) < launch.loops or not all(products):
        found = sum(map(bool, products))
        return f"no {launch.instruction} in {launch.loops - found} of {launch.loops} inner loops"
    if min(products) < launch.min_count:
        return f"{min(products)} of {launch.instruction} in an inner loop, of {launch.min_count} at least"
    share = min(count / loop.total() for count, loop in zip(products, loops, strict=True))
    if share < launch.share:
        return f"{launch.instruction} is {share:.0%} of the inner loop, of {launch.share:.0%} at least"
    return ""


def predict_seconds(
    device: DeviceSpec,
    policy: PrecisionPolicy,
    operation: KernelOperation,
    shape: ProblemShape,
    candidate: ConfigCandidate,
) -> float:
    """Predicted seconds of a candidate, by arithmetic alone; infinite if one of its launches could not run."""
    if any(find_fault(policy, launch, compiled) for launch, compiled in candidate.launches):
        return math.inf
    work = operation.work(policy, shape)
    launch, compiled = candidate.main
    bound_s = max(roofline(device, work).seconds, issue_seconds(device, work, compiled))
    residency = occupancy(policy.capability, compiled.threads, compiled.registers, compiled.shared)
    blocks = math.prod(launch.grid)
    waves = blocks / (device.sms * residency.blocks)
    resident = min(residency.warps, math.ceil(blocks / device.sms) * compiled.threads // 32)
    used = waves / math.ceil(waves) if waves > 1 else min(1.0, blocks / device.sms)
    covered = min(1.0, resident / COVERING_WARPS)
    moved = sum(launch.moved for launch, _ in candidate.launches)
    return bound_s / (used * covered) + moved / device.bandwidth + LAUNCH_S * len(candidate.launches)


def issue_seconds(device: DeviceSpec, work: OperationWork, compiled: CompiledKernel) -> float:
    """Least seconds that the schedulers need for the inner loop, at one warp instruction per clock.

    It follows from the share of multiply-adds of CUDA cores among the loop's PTX instructions. It is 0.0 where tensor
    cores multiply, which take few instructions, and where nothing is multiplied.
    """
    loop = compiled.inner_loop()
    multiply_adds = sum(count * _MULTIPLY_ADDS.get(name, 0) for name, count in loop.items())
    if not multiply_adds or any(name.startswith(_MATRIX) for name in loop):
        return 0.0
    chip = device.capability
    clocks = device.rates["fp32"] / 2 / chip.fp32_fma  # SM clocks per second, over all SMs
    each = sum(loop.values()) / multiply_adds
    return work.operations / 2 * each / (clocks * chip.schedulers * chip.warp)
