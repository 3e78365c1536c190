"""How many layers each pipeline stage gets: pure arithmetic, over what devices are and what layers cost on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import InvalidRequest
from .stages import check_stages

__all__ = ["Cost", "Seat", "partition", "stage_seconds"]

_Way = tuple[tuple[float, ...], tuple[int, ...]]  # bytes of memories, ends of stages


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

    Of those that are equally good, the one whose stages are most alike: the least sum of squares of their seconds; or
    where that takes more of a memory that several draw on than there is, one that does not.

    memory  bytes of each, that seats draw on

    Raises InvalidRequest where there are more stages than layers, or no way to divide them fits.
    """
    layers = len(seats[0].layers)
    check_stages(layers, len(seats), None)
    parts = [_Parts(seat, index == 0, index == len(seats) - 1) for index, seat in enumerate(seats)]
    found = _least(layers, parts, [_room(seat, memory) for seat in seats])
    if found is not None and not _fits(parts, found, memory):
        found = _least_together(layers, parts, memory)
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
        self._sums: list[list[float]] = [
            [0.0, *accumulate(getattr(cost, name) for cost in seat.layers)] for name in Cost.__slots__
        ]
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


def _fits(parts: Sequence[_Parts], sizes: Sequence[int], memory: Mapping[str, float]) -> bool:
    """Together."""
    taken = dict.fromkeys(memory, 0.0)
    for each, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
        for name, part in each.draws.items():
            taken[name] += part * each.held(end - size, end)
    return all(taken[name] <= nbytes for name, nbytes in memory.items())


def _least_together(layers: int, parts: Sequence[_Parts], memory: Mapping[str, float]) -> tuple[int, ...] | None:
    """The slowest stage takes as little as can be where all fit together. None: they do not."""
    spans = [(begin, end) for begin in range(layers) for end in range(begin + 1, layers + 1)]
    times = sorted({each.seconds(*span) for each in parts for span in spans})
    found, low, high = None, 0, len(times)
    while low < high:  # times[:low] are too short; within times[high], if there is one, is `found`
        middle = (low + high) // 2
        way = _within(layers, parts, memory, times[middle])
        if way is None:
            low = middle + 1
        else:
            found, high = way, middle
    return found


def _within(layers: int, parts: Sequence[_Parts], memory: Mapping[str, float], most_s: float) -> tuple[int, ...] | None:
    """A way that fits, with no stage that takes longer, by dynamic programming. None: there is none."""
    shared = [name for name in memory if sum(name in each.draws for each in parts) > 1]
    # found[end]: of the stages so far, with the first `end` layers, what they take of each shared memory, and their
    # ends. Of ways none takes less of each than another.
    found: list[list[_Way]] = [[((0.0,) * len(shared), ())], *[[] for _ in range(layers)]]
    for each in parts:
        longer: list[list[_Way]] = [[] for _ in range(layers + 1)]
        for begin, ways in enumerate(found):
            for end in range(begin + 1, layers + 1 if ways else 0):
                held = each.held(begin, end)
                if each.seconds(begin, end) > most_s or any(
                    part * held > memory[name] for name, part in each.draws.items()
                ):
                    break  # so do those with more layers
                own = [each.draws.get(name, 0.0) * held for name in shared]
                for taken, ends in ways:
                    together = tuple(one + other for one, other in zip(taken, own, strict=True))
                    if all(nbytes <= memory[name] for name, nbytes in zip(shared, together, strict=True)):
                        _keep(longer[end], (together, (*ends, end)))
        found = longer
    if not found[layers]:
        return None
    ends = found[layers][0][1]
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False))


def _keep(ways: list[_Way], way: _Way) -> None:
    """Unless another takes no more of anything; and then none that it takes no more than."""
    if any(_no_more(other, way) for other in ways):
        return
    ways[:] = [*(other for other in ways if not _no_more(way, other)), way]


def _no_more(way: _Way, than: _Way) -> bool:
    return all(one <= other for one, other in zip(way[0], than[0], strict=True))


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
