"""Compilation of many kernels at once on all cores; each is compiled only once, however many jobs need it.

A kernel for several capabilities of a PTX family is compiled for one of them, and assembled for each.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..device.precision import policy_of
from ..launch.kernel_operation import KernelLaunch, ProblemShape
from ..launch.variant import Config
from ..registry import find_operation
from .aot import CompiledKernel, assemble_ptx, compile_variant
from .ptx_families import ptx_family


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Job to compile all launches of one operator, for one shape and config, on one compute capability."""

    op: str
    capability: tuple[int, int]
    shape: ProblemShape
    config: Config

    def launches(self) -> tuple[KernelLaunch, ...]:
        return find_operation(self.op).launches(policy_of(*self.capability), self.shape, self.config)


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """Error of the compiler in place of a compiled kernel."""

    error: str


CompileResult = CompiledKernel | CompileFailure
Version = tuple[int, int]


def compile_all(
    jobs: Iterable[CompileJob], workers: int, done: Callable[[int, int], None] = lambda count, total: None
) -> Mapping[CompileJob, tuple[tuple[KernelLaunch, CompileResult], ...]]:
    """Compile every launch of every job; `done` is called with the number of finished kernels and the total.

    The kernels are compiled in separate processes, since Triton's compiler holds the GIL. It must not be used under
    TRITON_INTERPRET.
    """
    wanted = {job: job.launches() for job in jobs}
    sources: dict[Any, dict[Version, tuple[CompileJob, int]]] = {}
    for job, launches in wanted.items():
        for index, launch in enumerate(launches):
            sources.setdefault(_key(job, launch), {}).setdefault(job.capability, (job, index))
    proofs: dict[Any, _SamePtxProof] = defaultdict(_SamePtxProof)  # by (kernel, family)
    found: dict[tuple[Any, Version], CompileResult] = {}
    total = sum(map(len, sources.values()))
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(workers, len(sources)))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_freeze_garbage_collector) as pool:
        futures = {}
        for key, members in sources.items():
            job, index = next(iter(members.values()))
            kernel, family = wanted[job][index].variant.name, key[0]
            first, others, doubtful = proofs[kernel, family].order(tuple(members))
            futures[pool.submit(_compile, *members[first], others, doubtful)] = key
        for future in as_completed(futures):
            key = futures[future]
            found |= {(key, capability): result for capability, result in future.result().items()}
            done(len(found), total)
    return {
        job: tuple((launch, found[_key(job, launch), job.capability]) for launch in launches)
        for job, launches in wanted.items()
    }


class _SamePtxProof:
    """Record of the members of a PTX family that are proven to have the same PTX, for one kernel."""

    def __init__(self) -> None:
        self._same: set[Version] = set()

    def order(self, members: Sequence[Version]) -> tuple[Version, tuple[Version, ...], frozenset[Version]]:
        """Return the member to compile, those to assemble from its PTX, and those of them to also compile and
        compare.
        """
        first = next((each for each in members if each in self._same), members[0])
        others = tuple(each for each in members if each != first)
        if not others:
            return first, (), frozenset()
        if self._same and first not in self._same:  # nothing is known about both these and earlier members
            return first, others, frozenset(others)
        doubtful = frozenset(others) - self._same
        self._same.update(members)
        return first, others, doubtful


def _key(job: CompileJob, launch: KernelLaunch) -> Any:
    variant = launch.variant
    family = ptx_family(variant.name, job.capability)
    return family, variant.function, variant.types, variant.constants, variant.config, variant.aligned


def _freeze_garbage_collector() -> None:
    """Exclude torch and Triton from garbage collection, since they live as long as the process.

    Otherwise their objects would be scanned again after every few new objects.
    """
    import triton.backends.nvidia.compiler  # noqa: F401

    gc.freeze()
    gc.disable()
    atexit.register(gc.unfreeze)  # otherwise Triton's bindings report all of these objects as leaks


def _compile(
    job: CompileJob, index: int, others: Sequence[Version], doubtful: Collection[Version]
) -> dict[Version, CompileResult]:
    """Compile one kernel for `job`'s capability, and assemble it for `others` of its family.

    doubtful  members that are also compiled in full; different PTX is a failure
    """
    variant = job.launches()[index].variant
    first = _try_compile(lambda: compile_variant(variant, job.capability))
    found = {job.capability: first}
    for other in others:
        if isinstance(first, CompileFailure):
            found[other] = first
            continue
        found[other] = _try_compile(partial(assemble_ptx, first, variant, other))
        if other in doubtful:
            full = _try_compile(partial(compile_variant, variant, other))
            if isinstance(full, CompileFailure) or not full.same_ptx(first):
                found[other] = CompileFailure(f"its PTX is not that of {job.capability}: they are no family")
    gc.collect()  # free what compiling this kernel has left
    return found


def _try_compile(compile_: Callable[[], CompiledKernel]) -> CompileResult:
    try:
        return compile_()
    except Exception as error:  # noqa: BLE001  Triton raises whatever its passes do
        return CompileFailure(f"{type(error).__name__}: {str(error)[:500]}")
