"""Benchmark of single operators beside torch's equivalents: times, bytes and operations per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from motley.kernels.device.device_context import DeviceContext
from motley.kernels.launch.config_tables import choose_config
from motley.kernels.launch.kernel_operation import KernelOperation, KernelProblem, ProblemShape
from motley.kernels.launch.variant import Config
from motley.kernels.tuning.memory_limits import ShapeTooLarge, memory_shortage
from motley.kernels.tuning.timing import InputRotation, Timing, time_runs

T = TypeVar("T")
MAX_COPIES = 512  # copies of the inputs; if so many do not fill the cache, it is swept between two runs


@dataclass(frozen=True, slots=True)
class OperationMeasurement:
    """Measurement of one operator on one shape.

    how    how its config was found
    error  largest ratio of the error to the error that rounding explains: above 1 the result is wrong
    bytes  fewest bytes that it must move; `operations` are those that it must do
    peers  name -> its timing, or why there is none
    """

    op: str
    shape: ProblemShape
    config: Mapping[str, Any]
    how: str
    error: float
    timing: Timing
    bytes: float
    operations: int
    peers: Mapping[str, Timing | str]

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.timing.p50

    @property
    def operations_per_s(self) -> float:
        return self.operations / self.timing.p50


class TimeBudgetExceeded(Exception):
    """Exception that ends a measurement because its time budget ran out while inputs were being made."""


def make_within_budget(make: Callable[[int], T], copies: int, enough: Callable[[], bool]) -> list[T]:
    """Make one input for each seed.

    `enough` is called before each but the first. Raises TimeBudgetExceeded when it returns True.
    """
    made = [make(0)]
    for seed in range(1, copies):
        if enough():
            raise TimeBudgetExceeded
        made.append(make(seed))
    return made


def measure_operation(
    operation: KernelOperation,
    device_context: DeviceContext,
    shape: ProblemShape,
    enough: Callable[[], bool] = lambda: False,
) -> OperationMeasurement:
    """Measure an operator with the config that a launch would have, with inputs rotated so that none is in the cache.

    enough  see `make_within_budget`

    Raises ShapeTooLarge for a shape that does not fit into the device's memory.
    """
    if why := measurement_memory_shortage(operation, device_context, shape):
        raise ShapeTooLarge(why)
    choice = choose_config(operation, device_context.policy, shape, device_context.about)
    turns = _input_rotation(operation, device_context, shape)
    make = partial(operation.problem, device_context.policy, shape, device_context.device)
    problems = make_within_budget(make, turns.copies, enough)
    rounds = 20 if device_context.real else 1
    return measure_problems(
        operation.name, shape, problems, choice.config, choice.how, device_context.device, rounds, turns.sweep_bytes
    )


def measurement_memory_shortage(operation: KernelOperation, device_context: DeviceContext, shape: ProblemShape) -> str:
    """Text with the memory that measuring a shape needs, if it does not fit the device; else empty.

    Memory of peers is not counted.
    """
    return memory_shortage(operation, device_context, shape, _input_rotation(operation, device_context, shape).copies)


def _input_rotation(operation: KernelOperation, device_context: DeviceContext, shape: ProblemShape) -> InputRotation:
    return InputRotation.past(
        int(operation.work(device_context.policy, shape).bytes), device_context.cache_bytes, MAX_COPIES
    )


def measure_problems(
    op: str,
    shape: ProblemShape,
    problems: Sequence[KernelProblem],
    config: Config,
    how: str,
    device: torch.device,
    rounds: int = 20,
    sweep_bytes: int = 0,
) -> OperationMeasurement:
    """Check the result of the first problem, then measure the time over all problems in turn.

    sweep_bytes  see `time_runs`
    """
    first = problems[0]
    error = first.error(first.run(config))
    timing = time_runs([_run(problem, config) for problem in problems], device, rounds, sweep_bytes=sweep_bytes)
    peers = {name: _time_peer(name, problems, device, rounds, sweep_bytes) for name in first.peers}
    return OperationMeasurement(
        op, shape, config.to_json(), how, error, timing, first.work.bytes, first.work.operations, peers
    )  # fmt: skip


def _run(problem: KernelProblem, config: Config) -> Callable[[], object]:
    return lambda: problem.run(config)


def _time_peer(
    name: str, problems: Sequence[KernelProblem], device: torch.device, rounds: int, sweep_bytes: int
) -> Timing | str:
    runs = [problem.peers[name] for problem in problems]
    try:
        for run in runs:
            run()  # prepares what the peer needs, which must not be measured
        return time_runs(runs, device, rounds, sweep_bytes=sweep_bytes)
    except (RuntimeError, AttributeError, ValueError) as error:
        return f"not run: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
