"""Configs found by trying them: each must give the right answer before its time counts. On the GPU at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..device.device_context import DeviceContext
from ..launch.config_tables import ConfigEntry
from ..launch.kernel_operation import KernelOperation, KernelProblem, ProblemShape
from ..launch.known_spills import offered_configs
from ..launch.variant import Config
from .memory_limits import ShapeTooLarge, memory_shortage
from .timing import InputRotation, time_runs

__all__ = ["ConfigTrial", "search_configs", "search_memory_shortage"]

MOST_COPIES = 256  # of the inputs: making them must not take longer than trying; beyond, the cache is swept


@dataclass(frozen=True, slots=True)
class ConfigTrial:
    """One config: seconds, or why it does not count."""

    config: Config
    seconds: float | None
    why: str = ""


def search_configs(
    operation: KernelOperation,
    rig: DeviceContext,
    shape: ProblemShape,
    configs: Sequence[Config] = (),
    tried: Callable[[ConfigTrial], None] = lambda trial: None,
) -> ConfigEntry | None:
    """The fastest right config, with its microseconds and the GB/s that it moves. None if none is right.

    configs  those to try; empty: all that the operator has

    Raises TooLarge for a shape that the device's memory has no room for.
    """
    if why := search_memory_shortage(operation, rig, shape):
        raise ShapeTooLarge(why)
    work, turns = operation.work(rig.policy, shape), _input_rotation(operation, rig, shape)
    problems = [operation.problem(rig.policy, shape, rig.device, seed) for seed in range(turns.copies)]
    best: ConfigTrial | None = None
    for number, config in enumerate(configs or offered_configs(operation, rig.policy, shape)):
        # Inputs that no config has had before: what an earlier one left in memory is no answer to them.
        fresh = partial(operation.problem, rig.policy, shape, rig.device, seed=turns.copies + number)
        trial = _try_config(config, fresh, problems, rig, turns.sweep_bytes)
        tried(trial)
        if trial.seconds is not None and (best is None or best.seconds is None or trial.seconds < best.seconds):
            best = trial
    if best is None or best.seconds is None:
        return None
    facts = {"microseconds": round(best.seconds * 1e6, 2), "gb_per_s": round(work.bytes / best.seconds / 1e9)}
    return ConfigEntry(best.config, facts)


def search_memory_shortage(operation: KernelOperation, rig: DeviceContext, shape: ProblemShape) -> str:
    """What a search of that shape needs, where the device has no room for it; else empty."""
    return memory_shortage(
        operation, rig, shape, _input_rotation(operation, rig, shape).copies + 1
    )  # and the fresh one


def _input_rotation(operation: KernelOperation, rig: DeviceContext, shape: ProblemShape) -> InputRotation:
    return InputRotation.past(int(operation.work(rig.policy, shape).bytes), rig.cache_bytes, MOST_COPIES)


def _try_config(
    config: Config,
    fresh: Callable[[], KernelProblem],
    problems: list[KernelProblem],
    rig: DeviceContext,
    sweep_bytes: int,
) -> ConfigTrial:
    try:
        worst = _worst_error(fresh(), config)
        if not worst <= 1.0:  # NaN is wrong as well
            return ConfigTrial(config, None, f"wrong: off by {worst:.3g} times what rounding explains")
        runs = [partial(problem.run, config) for problem in problems]
        timing = time_runs(runs, rig.device, 20 if rig.real else 1, budget_s=0.05, sweep_bytes=sweep_bytes)
    except Exception as error:  # noqa: BLE001  what Triton's compiler and CUDA raise has no common kind
        return ConfigTrial(config, None, f"{type(error).__name__}: {str(error)[:200]}")
    return ConfigTrial(config, timing.p50)


def _worst_error(fresh: KernelProblem, config: Config) -> float:
    """Its inputs are gone afterwards: there is not always room for those of the next beside them."""
    return fresh.error(fresh.run(config))
