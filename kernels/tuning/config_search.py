"""Search for the fastest config on a GPU: each config must give the right result before its time counts."""

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

MAX_COPIES = 256  # copies of the inputs, so that making them is quicker than trying; beyond, the cache is swept


@dataclass(frozen=True, slots=True)
class ConfigTrial:
    """Trial of one config: its time in seconds, or why it does not count."""

    config: Config
    seconds: float | None
    why: str = ""


def search_configs(
    operation: KernelOperation,
    device_context: DeviceContext,
    shape: ProblemShape,
    configs: Sequence[Config] = (),
    tried: Callable[[ConfigTrial], None] = lambda trial: None,
) -> ConfigEntry | None:
    """Return the fastest correct config, with its microseconds and the GB/s that it moves; None if no config is
    correct.

    configs  configs to try; empty: all that the operator offers

    Raises ShapeTooLarge for a shape that does not fit into the device's memory.
    """
    if why := search_memory_shortage(operation, device_context, shape):
        raise ShapeTooLarge(why)
    work, turns = operation.work(device_context.policy, shape), _input_rotation(operation, device_context, shape)
    problems = [
        operation.problem(device_context.policy, shape, device_context.device, seed) for seed in range(turns.copies)
    ]
    best: ConfigTrial | None = None
    for number, config in enumerate(configs or offered_configs(operation, device_context.policy, shape)):
        # Inputs that no config has had before, so that results which an earlier config left in memory are wrong.
        fresh = partial(
            operation.problem, device_context.policy, shape, device_context.device, seed=turns.copies + number
        )
        trial = _try_config(config, fresh, problems, device_context, turns.sweep_bytes)
        tried(trial)
        if trial.seconds is not None and (best is None or best.seconds is None or trial.seconds < best.seconds):
            best = trial
    if best is None or best.seconds is None:
        return None
    facts = {"microseconds": round(best.seconds * 1e6, 2), "gb_per_s": round(work.bytes / best.seconds / 1e9)}
    return ConfigEntry(best.config, facts)


def search_memory_shortage(operation: KernelOperation, device_context: DeviceContext, shape: ProblemShape) -> str:
    """Text with the memory that a search of a shape needs, if it does not fit the device; else empty."""
    return memory_shortage(
        operation, device_context, shape, _input_rotation(operation, device_context, shape).copies + 1
    )  # one more than the copies, for the fresh inputs of each trial


def _input_rotation(operation: KernelOperation, device_context: DeviceContext, shape: ProblemShape) -> InputRotation:
    return InputRotation.past(
        int(operation.work(device_context.policy, shape).bytes), device_context.cache_bytes, MAX_COPIES
    )


def _try_config(
    config: Config,
    fresh: Callable[[], KernelProblem],
    problems: list[KernelProblem],
    device_context: DeviceContext,
    sweep_bytes: int,
) -> ConfigTrial:
    try:
        worst = _worst_error(fresh(), config)
        if not worst <= 1.0:  # also rejects NaN
            return ConfigTrial(config, None, f"wrong: off by {worst:.3g} times what rounding explains")
        runs = [partial(problem.run, config) for problem in problems]
        timing = time_runs(
            runs, device_context.device, 20 if device_context.real else 1, budget_s=0.05, sweep_bytes=sweep_bytes
        )
    except Exception as error:  # noqa: BLE001  what Triton's compiler and CUDA raise has no common kind
        return ConfigTrial(config, None, f"{type(error).__name__}: {str(error)[:200]}")
    return ConfigTrial(config, timing.p50)


def _worst_error(fresh: KernelProblem, config: Config) -> float:
    """Return the error of a config on fresh inputs, which are freed on return.

    There is not always enough memory for two sets of fresh inputs.
    """
    return fresh.error(fresh.run(config))
