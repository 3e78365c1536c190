"""How many layers each pipeline stage gets: pure arithmetic, over what devices are and what layers cost on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import InvalidRequest
from .stages import check_stages

__all__ = ["Cost", "Seat", "partition", "stage_seconds"]


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


@dataclass(frozen=True, slots=True)
class Seat:
    """What is to have a stage, and what the model costs there: in the formats and dtypes that it holds it in.

    bandwidth  bytes a second; compute: operations a second
    layers     all of the model
    first      the embedding, if it is the first stage; last: the final norm and the head, if it is the last
    draws      on which memories -> with which part of what it holds
    """

    bandwidth: float
    compute: float
    layers: Sequence[Cost]
    first: Cost
    last: Cost
    draws: Mapping[str, float]


def stage_seconds(seat: Seat, costs: Sequence[Cost]) -> float:
    """Of a step, by the roofline."""
    read, operations = sum(cost.read_bytes for cost in costs), sum(cost.operations for cost in costs)
    return max(read / seat.bandwidth, operations / seat.compute)


def partition(seats: Sequence[Seat], memory: Mapping[str, float]) -> tuple[int, ...]:
    """Layers of each stage, at least one, so that the slowest takes as little as can be: a pipeline is as fast as that.

    Of those that are equally good, the one whose stages are most alike: the least sum of squares of their seconds.

    memory  bytes of each, that seats draw on. Where several would take more of one than there is, each has a share by
            its bandwidth

    Raises InvalidRequest where there are more stages than layers, or no way to divide them fits.
    """
    layers = len(seats[0].layers)
    check_stages(layers, len(seats), None)
    parts = [_Parts(seat, index == 0, index == len(seats) - 1) for index, seat in enumerate(seats)]
    found = _least(layers, parts, [_room(seat, memory) for seat in seats])
    if found is not None and not _fits(parts, found, memory):
        found = _least(layers, parts, [_room(seat, _share(seat, seats, memory)) for seat in seats])
    if found is None:
        held = parts[0].held(0, layers) + (seats[0].last.held_bytes if len(seats) > 1 else 0)
        raise InvalidRequest(
            f"pipeline_parallel: {layers} layers, the embedding and the head, {_gib(held)} with KV, do not fit "
            f"{len(seats)} stages with {', '.join(f'{_gib(nbytes)} of {name}' for name, nbytes in memory.items())}",
            param="pipeline_parallel",
        )
    return found


class _Parts:
    """Sums of layers begin .. end - 1 at a seat, with what else is there."""

    def __init__(self, seat: Seat, is_first: bool, is_last: bool) -> None:
        self._seat = seat
        self._others = [seat.first] * is_first + [seat.last] * is_last
        self._sums = [[0.0, *accumulate(getattr(cost, name) for cost in seat.layers)] for name in Cost.__slots__]
        self.draws = seat.draws

    def seconds(self, begin: int, end: int) -> float:
        return stage_seconds(self._seat, [self._of(begin, end), *self._others])

    def held(self, begin: int, end: int) -> float:
        return self._sums[2][end] - self._sums[2][begin] + sum(cost.held_bytes for cost in self._others)

    def _of(self, begin: int, end: int) -> Cost:
        return Cost(*(each[end] - each[begin] for each in self._sums))


def _least(layers: int, parts: Sequence[_Parts], room: Sequence[float]) -> tuple[int, ...] | None:
    """None: nothing fits. room: bytes, of each stage."""

    def seconds(stage: int, begin: int, end: int) -> float:
        return parts[stage].seconds(begin, end) if parts[stage].held(begin, end) <= room[stage] else math.inf

    slowest, _ = _best(layers, len(parts), seconds, max)
    if slowest == math.inf:
        return None

    def square(stage: int, begin: int, end: int) -> float:
        taken = seconds(stage, begin, end)
        return taken**2 if taken <= slowest else math.inf

    _, ends = _best(layers, len(parts), square, lambda one, other: one + other)
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False))


def _room(seat: Seat, memory: Mapping[str, float]) -> float:
    """What it may hold, if nobody else draws on any of it."""
    return min(memory[name] / part for name, part in seat.draws.items())


def _share(seat: Seat, seats: Sequence[Seat], memory: Mapping[str, float]) -> dict[str, float]:
    """Of each memory that it draws on, by the bandwidth of all that do."""
    return {
        name: memory[name] * seat.bandwidth * part / sum(each.bandwidth * each.draws.get(name, 0.0) for each in seats)
        for name, part in seat.draws.items()
    }


def _fits(parts: Sequence[_Parts], sizes: Sequence[int], memory: Mapping[str, float]) -> bool:
    """Together."""
    taken = dict.fromkeys(memory, 0.0)
    for each, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
        for name, part in each.draws.items():
            taken[name] += part * each.held(end - size, end)
    return all(taken[name] <= nbytes for name, nbytes in memory.items())


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
