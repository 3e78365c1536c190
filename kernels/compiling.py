"""Many kernels compiled at once, on as many cores as there are: each of them once, whoever asks for it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from .aot import Compiled, compile_variant
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
    sources: dict[Any, tuple[Job, int]] = {}
    for job, launches in wanted.items():
        for index, launch in enumerate(launches):
            sources.setdefault(_key(job, launch), (job, index))
    found: dict[Any, Result] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_compile, job, index): key for key, (job, index) in sources.items()}
        for count, future in enumerate(as_completed(futures), 1):
            found[futures[future]] = future.result()
            done(count, len(futures))
    return {job: tuple((launch, found[_key(job, launch)]) for launch in launches) for job, launches in wanted.items()}


def _key(job: Job, launch: Launch) -> Any:
    variant = launch.variant
    return (
        job.capability, variant.function, variant.types, variant.constants, variant.config, variant.aligned
    )  # fmt: skip


def _compile(job: Job, index: int) -> Result:
    try:
        return compile_variant(job.launches()[index].variant, job.capability)
    except Exception as error:  # noqa: BLE001  Triton raises whatever its passes do
        return Failed(f"{type(error).__name__}: {str(error)[:500]}")
