"""Operators measured one by one, beside what torch has for the same: times, bytes and operations per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from .measure import Rotation, Timing, time_of
from .operation import Operation, Problem, Shape
from .rig import Rig
from .room import TooLarge, too_large
from .tuning import choose
from .variant import Config

__all__ = ["Measurement", "TimeIsUp", "lacking", "made_in_time", "measure", "of_operation"]

T = TypeVar("T")
MOST_COPIES = 512  # of the inputs; where so many do not fill the cache, it is swept between two runs


@dataclass(frozen=True, slots=True)
class Measurement:
    """One operator on one shape.

    how     where its config is from
    error   worst difference to the reference over what rounding explains: above 1 the result is wrong
    bytes   that it must move at least, and operations it must do
    peers   name -> its timing, or why there is none
    """

    op: str
    shape: Shape
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


class TimeIsUp(Exception):
    """Before inputs were made."""


def made_in_time(make: Callable[[int], T], copies: int, enough: Callable[[], bool]) -> list[T]:
    """One of each seed. `enough` is asked before each but the first. Raises TimeIsUp when it says so."""
    made = [make(0)]
    for seed in range(1, copies):
        if enough():
            raise TimeIsUp
        made.append(make(seed))
    return made


def of_operation(
    operation: Operation, rig: Rig, shape: Shape, enough: Callable[[], bool] = lambda: False
) -> Measurement:
    """With the config that a launch would have, inputs rotated past the cache. enough: of `made_in_time`.

    Raises TooLarge for a shape that the device's memory has no room for.
    """
    if why := lacking(operation, rig, shape):
        raise TooLarge(why)
    choice = choose(operation, rig.policy, shape, rig.about)
    turns = _turns(operation, rig, shape)
    make = partial(operation.problem, rig.policy, shape, rig.device)
    problems = made_in_time(make, turns.copies, enough)
    rounds = 20 if rig.real else 1
    return measure(operation.name, shape, problems, choice.config, choice.how, rig.device, rounds, turns.sweep_bytes)


def lacking(operation: Operation, rig: Rig, shape: Shape) -> str:
    """What measuring that shape needs, where the device has no room for it; else empty. Peers are not counted."""
    return too_large(operation, rig, shape, _turns(operation, rig, shape).copies)


def _turns(operation: Operation, rig: Rig, shape: Shape) -> Rotation:
    return Rotation.past(int(operation.work(rig.policy, shape).bytes), rig.cache_bytes, MOST_COPIES)


def measure(
    op: str,
    shape: Shape,
    problems: Sequence[Problem],
    config: Config,
    how: str,
    device: torch.device,
    rounds: int = 20,
    sweep_bytes: int = 0,
) -> Measurement:
    """Correctness first, on the first problem; then time, over all of them in turn. sweep_bytes: of `time_of`."""
    first = problems[0]
    error = first.error(first.run(config))
    timing = time_of([_run(problem, config) for problem in problems], device, rounds, sweep_bytes=sweep_bytes)
    peers = {name: _peer(name, problems, device, rounds, sweep_bytes) for name in first.peers}
    return Measurement(
        op, shape, config.to_json(), how, error, timing, first.work.bytes, first.work.operations, peers
    )  # fmt: skip


def _run(problem: Problem, config: Config) -> Callable[[], object]:
    return lambda: problem.run(config)


def _peer(name: str, problems: Sequence[Problem], device: torch.device, rounds: int, sweep_bytes: int) -> Timing | str:
    runs = [problem.peers[name] for problem in problems]
    try:
        for run in runs:
            run()  # makes what it needs, which must not be measured
        return time_of(runs, device, rounds, sweep_bytes=sweep_bytes)
    except (RuntimeError, AttributeError, ValueError) as error:
        return f"not run: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
