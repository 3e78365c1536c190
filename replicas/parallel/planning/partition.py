"""Search for how many layers each pipeline stage gets: pure arithmetic over devices' speeds and layers' costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...errors import InvalidRequest
from ...model.sharding.stages import check_stages

_Partitioning = tuple[tuple[float, ...], tuple[int, ...]]  # bytes taken of each shared memory, end of each stage


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of a layer, or of what only the first or the last pipeline stage has.

    read_bytes  bytes that a step reads: weights, and KV of its contexts
    operations  arithmetic operations in a step
    held_bytes  bytes of memory for weights and for KV
    """

    read_bytes: float
    operations: float
    held_bytes: float


@dataclass(frozen=True, slots=True)
class StageDevice:
    """Device or devices of one pipeline stage, and what the model costs there, in the formats and dtypes that it has
    there.

    bandwidth  bytes a second
    compute    operations a second
    layers     cost of every layer of the model
    first      cost of the embedding, if this is the first stage
    last       cost of the final norm and the head, if this is the last stage
    draws      names of the memories that the stage uses, each with the part of the stage's bytes that lies in it
    """

    bandwidth: float
    compute: float
    layers: Sequence[LayerCost]
    first: LayerCost
    last: LayerCost
    draws: Mapping[str, float]


def stage_seconds(stage_device: StageDevice, costs: Sequence[LayerCost]) -> float:
    """Seconds that a step takes in a stage with these costs, by the roofline: the longer of reading and computing."""
    read, operations = sum(cost.read_bytes for cost in costs), sum(cost.operations for cost in costs)
    return max(read / stage_device.bandwidth, operations / stage_device.compute)


def partition_layers(stage_devices: Sequence[StageDevice], memory: Mapping[str, float]) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one, for which the slowest stage takes the least time, since
    a pipeline is as fast as its slowest stage.

    Of equally good ways it returns the one with the least sum of squares of the stages' seconds, in which stages are
    most alike. Where that way overfills a memory that several stages share, it returns another that fits.

    memory  bytes of each memory that the stages use, by name

    Raises InvalidRequest where there are more stages than layers, or where no way to divide them fits.
    """
    layers = len(stage_devices[0].layers)
    check_stages(layers, len(stage_devices), None)
    parts = [
        _StageCosts(stage_device, index == 0, index == len(stage_devices) - 1)
        for index, stage_device in enumerate(stage_devices)
    ]
    found = _fastest_partition(layers, parts, [_free_bytes(stage_device, memory) for stage_device in stage_devices])
    if found is not None and not _fits(parts, found, memory):
        found = _fastest_shared_partition(layers, parts, memory)
    if found is None:
        held = parts[0].held(0, layers) + (stage_devices[0].last.held_bytes if len(stage_devices) > 1 else 0)
        raise InvalidRequest(
            f"pipeline_parallel: {layers} layers, the embedding and the head, {_gib(held)} with KV, do not fit "
            f"{len(stage_devices)} stages with "
            f"{', '.join(f'{_gib(nbytes)} of {name}' for name, nbytes in memory.items())}",
            param="pipeline_parallel",
        )
    return found


class _StageCosts:
    """Prefix sums of the layers' costs for one stage, for the cost of layers begin to end - 1 with the embedding or the
    head.
    """

    def __init__(self, stage_device: StageDevice, is_first: bool, is_last: bool) -> None:
        self._device = stage_device
        self._others = [stage_device.first] * is_first + [stage_device.last] * is_last
        self._sums: list[list[float]] = [
            [0.0, *accumulate(getattr(cost, name) for cost in stage_device.layers)] for name in LayerCost.__slots__
        ]
        self.draws = stage_device.draws

    def seconds(self, begin: int, end: int) -> float:
        return stage_seconds(self._device, [self._of(begin, end), *self._others])

    def held(self, begin: int, end: int) -> float:
        return self._sums[2][end] - self._sums[2][begin] + sum(cost.held_bytes for cost in self._others)

    def _of(self, begin: int, end: int) -> LayerCost:
        return LayerCost(*(each[end] - each[begin] for each in self._sums))


def _fastest_partition(
    layers: int, parts: Sequence[_StageCosts], capacities: Sequence[float]
) -> tuple[int, ...] | None:
    """Return the number of layers of each stage for which the slowest takes the least time, then the least sum of
    squares.

    capacities  bytes that each stage may hold

    Returns None where nothing fits.
    """

    def seconds(stage: int, begin: int, end: int) -> float:
        return parts[stage].seconds(begin, end) if parts[stage].held(begin, end) <= capacities[stage] else math.inf

    slowest, _ = _best_partition(layers, len(parts), seconds, max)
    if slowest == math.inf:
        return None

    def square(stage: int, begin: int, end: int) -> float:
        taken = seconds(stage, begin, end)
        return taken**2 if taken <= slowest else math.inf

    _, ends = _best_partition(layers, len(parts), square, lambda one, other: one + other)
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False))


def _free_bytes(stage_device: StageDevice, memory: Mapping[str, float]) -> float:
    """Bytes that a pipeline stage may hold if no other stage uses the same memories."""
    return min(memory[name] / part for name, part in stage_device.draws.items())


def _fits(parts: Sequence[_StageCosts], sizes: Sequence[int], memory: Mapping[str, float]) -> bool:
    """Return whether all pipeline stages together fit the memories that they share."""
    taken = dict.fromkeys(memory, 0.0)
    for each, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
        for name, part in each.draws.items():
            taken[name] += part * each.held(end - size, end)
    return all(taken[name] <= nbytes for name, nbytes in memory.items())


def _fastest_shared_partition(
    layers: int, parts: Sequence[_StageCosts], memory: Mapping[str, float]
) -> tuple[int, ...] | None:
    """Return the number of layers of each stage for which the slowest takes the least time while all fit the memories
    that they share. Returns None where there is no such way.
    """
    spans = [(begin, end) for begin in range(layers) for end in range(begin + 1, layers + 1)]
    times = sorted({each.seconds(*span) for each in parts for span in spans})
    found, low, high = None, 0, len(times)
    while low < high:  # times[:low] are too short, and `found` takes at most times[high], if there is one
        middle = (low + high) // 2
        way = _partition_within(layers, parts, memory, times[middle])
        if way is None:
            low = middle + 1
        else:
            found, high = way, middle
    return found


def _partition_within(
    layers: int, parts: Sequence[_StageCosts], memory: Mapping[str, float], max_s: float
) -> tuple[int, ...] | None:
    """Find by dynamic programming a way that fits the memories and in which no stage takes longer than `max_s`
    seconds.

    Returns the number of layers of each stage; None where there is no such way.
    """
    shared = [name for name in memory if sum(name in each.draws for each in parts) > 1]
    # found[end]: ways to give the first `end` layers to the stages so far. Each is the bytes that it takes of every
    # shared memory and the stages' ends. Ways that take no less of any memory than another are left out.
    found: list[list[_Partitioning]] = [[((0.0,) * len(shared), ())], *[[] for _ in range(layers)]]
    for each in parts:
        longer: list[list[_Partitioning]] = [[] for _ in range(layers + 1)]
        for begin, ways in enumerate(found):
            for end in range(begin + 1, layers + 1 if ways else 0):
                held = each.held(begin, end)
                if each.seconds(begin, end) > max_s or any(
                    part * held > memory[name] for name, part in each.draws.items()
                ):
                    break  # more layers take longer and hold more
                own = [each.draws.get(name, 0.0) * held for name in shared]
                for taken, ends in ways:
                    together = tuple(one + other for one, other in zip(taken, own, strict=True))
                    if all(nbytes <= memory[name] for name, nbytes in zip(shared, together, strict=True)):
                        _keep_if_undominated(longer[end], (together, (*ends, end)))
        found = longer
    if not found[layers]:
        return None
    ends = found[layers][0][1]
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False))


def _keep_if_undominated(ways: list[_Partitioning], way: _Partitioning) -> None:
    """Add a way to a list unless a listed one takes no more of any shared memory; then remove those that it makes
    needless.
    """
    if any(_dominates(other, way) for other in ways):
        return
    ways[:] = [*(other for other in ways if not _dominates(way, other)), way]


def _dominates(way: _Partitioning, than: _Partitioning) -> bool:
    return all(one <= other for one, other in zip(way[0], than[0], strict=True))


def _best_partition(
    layers: int, stages: int, cost: Callable[[int, int, int], float], joined: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Return the least total cost of all stages, found by dynamic programming, and the layer at which each stage ends.

    cost    cost of stage s with layers begin to end - 1
    joined  total of the stages so far and the next one; it must not become less when either becomes more
    """
    # found[end]: the best way to give the first `end` layers to the stages so far
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
