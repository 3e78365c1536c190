"""Configs found by trying them: each must give the right answer before its time counts. On the GPU at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .measure import Rotation, time_of
from .operation import Operation, Problem, Shape
from .rig import Rig
from .room import TooLarge, too_large
from .spills import offered
from .tuning import Entry
from .variant import Config

__all__ = ["Trial", "lacking", "search"]

MOST_COPIES = 256  # of the inputs: making them must not take longer than trying; beyond, the cache is swept


@dataclass(frozen=True, slots=True)
class Trial:
    """One config: seconds, or why it does not count."""

    config: Config
    seconds: float | None
    why: str = ""


def search(
    operation: Operation,
    rig: Rig,
    shape: Shape,
    configs: Sequence[Config] = (),
    tried: Callable[[Trial], None] = lambda trial: None,
) -> Entry | None:
    """The fastest right config, with its microseconds and the GB/s that it moves. None if none is right.

    configs  those to try; empty: all that the operator has

    Raises TooLarge for a shape that the device's memory has no room for.
    """
    if why := lacking(operation, rig, shape):
        raise TooLarge(why)
    work, turns = operation.work(rig.policy, shape), _turns(operation, rig, shape)
    problems = [operation.problem(rig.policy, shape, rig.device, seed) for seed in range(turns.copies)]
    best: Trial | None = None
    for number, config in enumerate(configs or offered(operation, rig.policy, shape)):
        # Inputs that no config has had before: what an earlier one left in memory is no answer to them.
        fresh = partial(operation.problem, rig.policy, shape, rig.device, seed=turns.copies + number)
        trial = _try(config, fresh, problems, rig, turns.sweep_bytes)
        tried(trial)
        if trial.seconds is not None and (best is None or best.seconds is None or trial.seconds < best.seconds):
            best = trial
    if best is None or best.seconds is None:
        return None
    facts = {"microseconds": round(best.seconds * 1e6, 2), "gb_per_s": round(work.bytes / best.seconds / 1e9)}
    return Entry(best.config, facts)


def lacking(operation: Operation, rig: Rig, shape: Shape) -> str:
    """What a search of that shape needs, where the device has no room for it; else empty."""
    return too_large(operation, rig, shape, _turns(operation, rig, shape).copies + 1)  # and the fresh one


def _turns(operation: Operation, rig: Rig, shape: Shape) -> Rotation:
    return Rotation.past(int(operation.work(rig.policy, shape).bytes), rig.cache_bytes, MOST_COPIES)


def _try(config: Config, fresh: Callable[[], Problem], problems: list[Problem], rig: Rig, sweep_bytes: int) -> Trial:
    try:
        worst = _worst(fresh(), config)
        if not worst <= 1.0:  # NaN is wrong as well
            return Trial(config, None, f"wrong: off by {worst:.3g} times what rounding explains")
        runs = [partial(problem.run, config) for problem in problems]
        timing = time_of(runs, rig.device, 20 if rig.real else 1, budget_s=0.05, sweep_bytes=sweep_bytes)
    except Exception as error:  # noqa: BLE001  what Triton's compiler and CUDA raise has no common kind
        return Trial(config, None, f"{type(error).__name__}: {str(error)[:200]}")
    return Trial(config, timing.p50)


def _worst(fresh: Problem, config: Config) -> float:
    """Its inputs are gone afterwards: there is not always room for those of the next beside them."""
    return fresh.error(fresh.run(config))
