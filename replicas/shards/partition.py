"""How many layers each pipeline stage gets: pure arithmetic, over what devices are and what layers cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import InvalidRequest

__all__ = ["Cost", "StageDevice", "partition", "stage_seconds"]


@dataclass(frozen=True, slots=True)
class StageDevice:
    """bandwidth: bytes a second; compute: operations a second; memory_bytes: for weights and KV."""

    bandwidth: float
    compute: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a layer, or of what the first and the last stage have besides.

    read_bytes  in a step: weights, and KV of its contexts
    operations  in a step
    held_bytes  weights, and room for KV
    """

    read_bytes: float
    operations: float
    held_bytes: float


def stage_seconds(device: StageDevice, costs: Sequence[Cost]) -> float:
    """Of a step, by the roofline; infinite where it does not fit."""
    if sum(cost.held_bytes for cost in costs) > device.memory_bytes:
        return math.inf
    read, operations = sum(cost.read_bytes for cost in costs), sum(cost.operations for cost in costs)
    return max(read / device.bandwidth, operations / device.compute)


def partition(layers: Sequence[Cost], first: Cost, last: Cost, devices: Sequence[StageDevice]) -> tuple[int, ...]:
    """Layers of each stage, at least one, so that the slowest takes as little as can be: a pipeline is as fast as that.

    Of those that are equally good, the one whose stages are most alike: the least sum of squares of their seconds.

    first  the embedding, of the first stage; last: the final norm and the head, of the last

    Raises InvalidRequest where there are more stages than layers, or no way to divide them fits.
    """
    if len(devices) > len(layers):
        raise InvalidRequest(
            f"pipeline_parallel: {len(devices)} stages are more than the {len(layers)} layers of the model",
            param="pipeline_parallel",
        )
    sums = [[0.0, *accumulate(getattr(cost, name) for cost in layers)] for name in Cost.__slots__]

    def seconds(stage: int, begin: int, end: int) -> float:
        costs = [Cost(*(each[end] - each[begin] for each in sums))]
        costs += [first] * (stage == 0) + [last] * (stage == len(devices) - 1)
        return stage_seconds(devices[stage], costs)

    slowest, _ = _best(len(layers), len(devices), seconds, max)
    if slowest == math.inf:
        raise InvalidRequest(
            f"pipeline_parallel: {len(layers)} layers, the embedding and the head, "
            f"{_gib(sums[2][-1] + first.held_bytes + last.held_bytes)} with KV, do not fit {len(devices)} stages of "
            f"{', '.join(_gib(device.memory_bytes) for device in devices)}",
            param="pipeline_parallel",
        )

    def square(stage: int, begin: int, end: int) -> float:
        taken = seconds(stage, begin, end)
        return taken**2 if taken <= slowest else math.inf

    _, ends = _best(len(layers), len(devices), square, lambda one, other: one + other)
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False))


def _best(
    layers: int, stages: int, cost: Callable[[int, int, int], float], joined: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least cost of all stages, by dynamic programming, and where each of them ends.

    cost    of stage s with layers begin .. end - 1
    joined  of some stages and of the next: no less when either is more
    """
    # found[end]: of the stages so far, with the first `end` layers
    impossible: tuple[float, tuple[int, ...]] = (math.inf, ())
    found = [(0.0, impossible[1]), *[impossible] * layers]
    for stage in range(stages):
        found = [
            min(
                ((joined(found[begin][0], cost(stage, begin, end)), (*found[begin][1], end)) for begin in range(end)),
                default=impossible,
            )
            for end in range(layers + 1)
        ]
    return found[layers]


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
