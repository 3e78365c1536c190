"""Compile matrix: every operator compiled for every capability with the configs of `tuned/`, and checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..compiler import compile_speed
from ..compiler.compile_pool import CompileFailure, CompileJob, compile_all
from ..compiler.compile_speed import REFERENCE_S, cpu_seconds
from ..device.compute_capability import CAPABILITIES
from ..device.occupancy import occupancy
from ..device.precision import policy_of
from ..launch.config_tables import choose_config, table_folder, tabled_devices
from ..launch.kernel_operation import KernelOperation, ProblemShape, main_launch_index
from ..launch.variant import Variant
from .static_prediction import find_fault
from .table_staleness import describe_staleness, tabled_jobs


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """Row of the matrix: one kernel on one compute capability; numbers are 0 if it did not compile.

    found         how its config was found
    fault         empty, or what is wrong with the compiled kernel
    shared_limit  bytes of shared memory that a block may have on this capability
    occupancy     resident warps as a fraction of those that an SM can hold
    mix           counts of notable PTX instructions
    instructions  counts of all PTX instructions, by full name
    cached        whether it came from Triton's cache
    """

    op: str
    kernel: str
    capability: tuple[int, int]
    shape: str
    config: Mapping[str, Any]
    found: str
    fault: str
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    shared_limit: int = 0
    threads: int = 0
    occupancy: float = 0.0
    seconds: float = 0.0
    mix: Mapping[str, int] | None = None
    instructions: Mapping[str, int] | None = None
    cached: bool = False

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        counts = {"mix": dict(self.mix or {}), "instructions": dict(self.instructions or {})}
        return {**fields, "capability": "{}.{}".format(*self.capability), **counts}


def select_jobs(
    operation: KernelOperation, capability: tuple[int, int], *, quick: bool = False
) -> dict[CompileJob, str]:
    """Return the jobs to compile for one operator and capability, and how each config was found.

    They are the samples and every tuned shape, each with the config that it would get by every table that exists, of
    the capability and of single devices. A sample with rows between two classes is compiled with each config that its
    class has for any shape, as it may be launched. Every entry of a static table is included, so that all its facts are
    compared.

    quick  for each kernel only the first job for whose very shape a table has an entry, else the first: enough to see
           that another Triton compiles it, without spills and to the same instructions
    """
    policy = policy_of(*capability)
    if operation.refusal(policy):
        return {}
    samples, tuned = operation.samples(policy), operation.shapes(policy)
    shapes = dict.fromkeys((*samples, *tuned, *_intermediate_shapes(samples, tuned)))
    found: dict[CompileJob, str] = {}
    for shape in shapes:
        for device in (None, *tabled_devices(policy.capability)):
            choice = choose_config(operation, policy, shape, device)
            found.setdefault(CompileJob(operation.name, capability, shape, choice.config), choice.how)
    for job in tabled_jobs(operation, policy):
        found.setdefault(job, f"static: this shape in {table_folder(policy.capability)}")
    return _minimal_jobs(found) if quick else found


def _intermediate_shapes(samples: Iterable[ProblemShape], tuned: Iterable[ProblemShape]) -> Iterator[ProblemShape]:
    """Yield tuned shapes with the numbers of rows of those samples that are launched with another number's config."""
    tuned = tuple(tuned)
    for sample in samples:
        looked_up = dict(sample.rounded.fields)
        own = {name: value for name, value in sample.fields if looked_up[name] != value}
        for shape in tuned if own else ():
            if all(shape[name] == looked_up[name] for name in own):
                yield ProblemShape.of(**{**dict(sample.fields), **dict(shape.fields), **own})


def _minimal_jobs(found: Mapping[CompileJob, str]) -> dict[CompileJob, str]:
    """Return a few of the compile jobs that together launch every kernel of an operator."""
    by_tables_first = sorted(found.items(), key=lambda item: "this shape in" not in item[1])
    minimal: dict[CompileJob, str] = {}
    kernels: set[str] = set()
    for job, how in by_tables_first:
        names = {launch.variant.name for launch in job.launches()}
        if not names <= kernels:
            kernels |= names
            minimal[job] = how
    return minimal


@dataclass(frozen=True, slots=True)
class CompileTime:
    """Time that compiling took, by the clock and in CPU time of all cores.

    CPU time does not count compilers that had to wait for others.

    pace  result of `compile_speed.measure_compile_seconds` in the same run
    """

    seconds: float
    cpu_seconds: float
    pace: float = REFERENCE_S

    @property
    def two_core_seconds(self) -> float:
        """Seconds that the compilations would have taken on two otherwise idle cores: half of their processor time."""
        return self.cpu_seconds / 2

    @property
    def reference_seconds(self) -> float:
        """Seconds on two cores of the machine for which budgets hold: a machine half as fast may take twice as long."""
        return self.two_core_seconds * REFERENCE_S / self.pace

    def over(self, budget: float | None) -> bool:
        return budget is not None and self.reference_seconds > budget

    def describe(self, rows: Sequence[MatrixRow], budget: float | None) -> str:
        """Text with the times and the number of compiled kernels.

        Kernels from the cache are counted separately, since they say nothing about a cold run.
        """
        warm = sum(row.cached for row in rows)
        allowed = "" if budget is None else f"; {self.reference_seconds:.0f} s at the pace of its budget, {budget:g} s"
        return (
            f"{len(rows) - warm} compiled anew and {warm} from the cache in {self.seconds:.0f} s, "
            f"{self.two_core_seconds:.0f} s of two cores{allowed}"
        )


def run_matrix(
    operations: Iterable[KernelOperation],
    capabilities: Iterable[tuple[int, int]] = tuple(CAPABILITIES),
    workers: int = 1,
    done: Callable[[int, int], None] = lambda count, total: None,
    *,
    quick: bool = False,
    calibrated: bool = False,
) -> tuple[list[MatrixRow], CompileTime]:
    """Return a row for each distinct kernel, and the time that everything took.

    calibrated  also measure the time that this machine takes now for a fixed kernel
    """
    pace = compile_speed.measure_compile_seconds() if calibrated else REFERENCE_S
    began, cpu = time.perf_counter(), cpu_seconds()
    by_name = {operation.name: operation for operation in operations}
    capabilities = tuple(capabilities)
    jobs: dict[CompileJob, str] = {}
    for each in by_name.values():
        for capability in capabilities:
            jobs |= select_jobs(each, capability, quick=quick)
    rows: dict[Any, MatrixRow] = {}
    for job, results in compile_all(jobs, workers, done).items():
        policy = policy_of(*job.capability)
        keys = [_key(job, launch.variant) for launch, _ in results]
        for key, (launch, compiled) in zip(keys, results, strict=True):
            variant = launch.variant
            if key in rows:
                continue
            head = (job.op, variant.name, job.capability, job.shape.key, variant.config.to_json(), jobs[job])
            if isinstance(compiled, CompileFailure):
                rows[key] = MatrixRow(*head, compiled.error)
                continue
            residency = occupancy(policy.capability, compiled.threads, compiled.registers, compiled.shared)
            rows[key] = MatrixRow(
                *head, find_fault(policy, launch, compiled),
                compiled.registers, compiled.spilled, compiled.shared, policy.capability.shared_optin, compiled.threads,
                residency.fraction, compiled.seconds,
                _notable_instructions(compiled.mix()), compiled.mix(), compiled.cached,
            )  # fmt: skip
        of_config = keys[main_launch_index([launch for launch, _ in results])]
        if (why := describe_staleness(job, results)) and not rows[of_config].fault:
            rows[of_config] = replace(rows[of_config], fault=why)
    return list(rows.values()), CompileTime(time.perf_counter() - began, cpu_seconds() - cpu, pace)


def _key(job: CompileJob, variant: Variant) -> Any:
    return job.op, job.capability, variant.function, variant.types, variant.constants, variant.config


def _notable_instructions(mix: Mapping[str, int]) -> dict[str, int]:
    """Count the products, by unit, and the loads from global memory, copies and barriers."""
    prefixes = {
        "fma.f32": "fma.rn.f32", "fma.f16x2": "fma.rn.f16x2", "dp4a": "dp4a", "mma.sync": "mma.sync",
        "wgmma": "wgmma.mma", "tcgen05.mma": "tcgen05.mma", "load": "ld.global", "copy": "cp.async.c",
        "barrier": "bar.sync",
    }  # fmt: skip
    counts = {
        name: sum(count for instruction, count in mix.items() if instruction.startswith(prefix))
        for name, prefix in prefixes.items()
    }
    return {name: count for name, count in counts.items() if count}
