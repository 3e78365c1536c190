"""Many kernels compiled at once, on as many cores as there are: each of them once, whoever asks for it.

What several capabilities of a family want is compiled for one of them, and assembled for each.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

from .aot import Compiled, assembled, compile_variant, family_of
from .operation import Launch, Shape
from .precision import policy_of
from .registry import operation
from .variant import Config

__all__ = ["Failed", "Job", "compile_all"]


@dataclass(frozen=True, slots=True)
class Job:
    """All launches of one operator, for one shape and config, on one capability."""

    op: str
    capability: tuple[int, int]
    shape: Shape
    config: Config

    def launches(self) -> tuple[Launch, ...]:
        return operation(self.op).launches(policy_of(*self.capability), self.shape, self.config)


@dataclass(frozen=True, slots=True)
class Failed:
    """What the compiler said instead."""

    error: str


Result = Compiled | Failed


def compile_all(
    jobs: Iterable[Job], workers: int, done: Callable[[int, int], None] = lambda count, total: None
) -> Mapping[Job, tuple[tuple[Launch, Result], ...]]:
    """Every launch of every job. `done` is told how many kernels of how many there are.

    In processes of their own: Triton's compiler holds the interpreter's lock. Not under TRITON_INTERPRET.
    """
    wanted = {job: job.launches() for job in jobs}
    sources: dict[Any, dict[tuple[int, int], tuple[Job, int]]] = {}
    for job, launches in wanted.items():
        for index, launch in enumerate(launches):
            sources.setdefault(_key(job, launch), {}).setdefault(job.capability, (job, index))
    proven: set[tuple[str, tuple[int, int]]] = set()  # kernels and families
    found: dict[tuple[Any, tuple[int, int]], Result] = {}
    total = sum(map(len, sources.values()))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {}
        for key, members in sources.items():
            first, *others = members.values()
            about = wanted[first[0]][first[1]].variant.name, family_of(first[0].capability)
            futures[pool.submit(_compile, *first, [job for job, _ in others], prove=about not in proven)] = key
            if others:
                proven.add(about)
        for future in as_completed(futures):
            key = futures[future]
            found |= {(key, capability): result for capability, result in future.result().items()}
            done(len(found), total)
    return {
        job: tuple((launch, found[_key(job, launch), job.capability]) for launch in launches)
        for job, launches in wanted.items()
    }


def _key(job: Job, launch: Launch) -> Any:
    variant = launch.variant
    return (
        family_of(job.capability), variant.function, variant.types, variant.constants, variant.config, variant.aligned
    )  # fmt: skip


def _compile(job: Job, index: int, others: Sequence[Job], *, prove: bool) -> dict[tuple[int, int], Result]:
    """One kernel for `job`'s capability, and for those of its family in `others`.

    prove  compile those in full as well: whatever is not the same PTX is a failure
    """
    variant = job.launches()[index].variant
    first = _attempt(lambda: compile_variant(variant, job.capability))
    found = {job.capability: first}
    for other in (each.capability for each in others):
        if isinstance(first, Failed):
            found[other] = first
            continue
        found[other] = _attempt(partial(assembled, first, variant, other))
        if prove:
            full = _attempt(partial(compile_variant, variant, other))
            if isinstance(full, Failed) or not full.same_ptx(first):
                found[other] = Failed(f"its PTX is not that of {job.capability}: they are no family")
    return found


def _attempt(compile_: Callable[[], Compiled]) -> Result:
    try:
        return compile_()
    except Exception as error:  # noqa: BLE001  Triton raises whatever its passes do
        return Failed(f"{type(error).__name__}: {str(error)[:500]}")
