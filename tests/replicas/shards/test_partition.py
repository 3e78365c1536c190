"""Layers of unequal stages: as good as the best of all ways there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from motley.replicas.errors import InvalidRequest
from motley.replicas.parallel.planning.partition import LayerCost, StageDevice, partition_layers, stage_seconds

NOTHING = LayerCost(0, 0, 0)


@dataclass(frozen=True)
class Device:
    """memory: bytes of its own; more: in how many times the bytes it holds what others do."""

    bandwidth: float
    compute: float
    memory: float
    more: int = 1

    def cost(self, cost: LayerCost) -> LayerCost:
        return LayerCost(cost.read_bytes * self.more, cost.operations, cost.held_bytes * self.more)


costs = st.builds(LayerCost, st.integers(0, 50), st.integers(0, 50), st.integers(0, 20))
devices = st.builds(Device, st.integers(1, 9), st.integers(1, 9), st.integers(0, 90), st.integers(1, 2))


def seats(layers: Sequence[LayerCost], first: LayerCost, last: LayerCost, on: Sequence[Device]) -> list[StageDevice]:
    """Each on its own memory, by its number."""
    return [
        StageDevice(
            each.bandwidth, each.compute, [each.cost(layer) for layer in layers], each.cost(first), each.cost(last),
            {str(number): 1.0},
        )
        for number, each in enumerate(on)
    ]  # fmt: skip


def divided(layers: Sequence[LayerCost], first: LayerCost, last: LayerCost, on: Sequence[Device]) -> tuple[int, ...]:
    return partition_layers(
        seats(layers, first, last, on), {str(number): each.memory for number, each in enumerate(on)}
    )


def ways(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, layers)))


def parts(sizes: Sequence[int], at: Sequence[StageDevice]) -> list[list[LayerCost]]:
    """Return the layers of each stage, one by one."""
    begun, found = 0, []
    for stage, (size, seat) in enumerate(zip(sizes, at, strict=True)):
        own = list(seat.layers[begun : begun + size])
        own += [seat.first] if stage == 0 else []
        own += [seat.last] if stage == len(at) - 1 else []
        begun += size
        found.append(own)
    return found


def held(costs: Sequence[LayerCost]) -> float:
    return sum(cost.held_bytes for cost in costs)


@settings(max_examples=300, deadline=None)
@given(st.lists(costs, min_size=1, max_size=7), costs, costs, st.lists(devices, min_size=1, max_size=4))
def test_no_other_way_is_better(layers: list[LayerCost], first: LayerCost, last: LayerCost, on: list[Device]) -> None:
    """Every way is tried; where none fits, that is said."""
    at = seats(layers, first, last, on)
    by_way = {way: parts(way, at) for way in ways(len(layers), len(on))}
    fitting = {
        way: [stage_seconds(seat, own) for seat, own in zip(at, of_stages, strict=True)]
        for way, of_stages in by_way.items()
        if all(held(own) <= device.memory for own, device in zip(of_stages, on, strict=True))
    }
    slowest = min((max(each) for each in fitting.values()), default=math.inf)
    if slowest == math.inf:
        with pytest.raises(InvalidRequest) as refused:
            divided(layers, first, last, on)
        assert refused.value.param == "pipeline_parallel"
        return
    found = divided(layers, first, last, on)
    assert max(fitting[found]) == slowest
    alike = min(sum(t * t for t in each) for each in fitting.values() if max(each) == slowest)
    assert sum(t * t for t in fitting[found]) == pytest.approx(alike)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(costs, min_size=2, max_size=7),
    costs,
    costs,
    st.lists(devices, min_size=2, max_size=4),
    st.text("ab", min_size=4),
)
def test_no_other_way_is_better_where_memory_is_shared(
    layers: list[LayerCost], first: LayerCost, last: LayerCost, on: list[Device], names: str
) -> None:
    """Compares only ways that fit together."""
    memory: dict[str, float] = {}
    for name, device in zip(names, on, strict=False):
        memory[name] = max(memory.get(name, 0), 2 * device.memory)
    at = [replace(seat, draws={name: 1.0}) for seat, name in zip(seats(layers, first, last, on), names, strict=False)]
    slowest = {}
    for way in ways(len(layers), len(on)):
        taken = dict.fromkeys(memory, 0.0)
        for name, own in zip(names, parts(way, at), strict=False):
            taken[name] += held(own)
        if all(taken[name] <= memory[name] for name in memory):
            slowest[way] = max(stage_seconds(seat, own) for seat, own in zip(at, parts(way, at), strict=True))
    if not slowest:
        with pytest.raises(InvalidRequest):
            partition_layers(at, memory)
        return
    assert slowest[partition_layers(at, memory)] == min(slowest.values())


def test_ranks_of_one_host_have_its_memory_once_and_those_of_two_have_both() -> None:
    """Each rank holds half of a stage."""
    layers, rest = [LayerCost(1, 0, 1)] * 10, {"c": 1.0}
    for draws, memory in (({"a": 1.0}, {"a": 4, "c": 99}), ({"a": 0.5, "b": 0.5}, {"a": 4, "b": 4, "c": 99})):
        at = [StageDevice(9, 9, layers, NOTHING, NOTHING, draws), StageDevice(1, 9, layers, NOTHING, NOTHING, rest)]
        assert partition_layers(at, memory)[0] == sum(memory[name] for name in draws)


def test_a_device_of_three_times_the_bandwidth_has_three_times_the_layers() -> None:
    on = [Device(1, 1e9, 1e9), Device(3, 1e9, 1e9)]
    assert divided([LayerCost(1, 0, 1)] * 24, NOTHING, NOTHING, on) == (6, 18)


def test_what_computes_slowly_has_fewer_where_computing_takes_the_time() -> None:
    on = [Device(100, 1, 1e9), Device(100, 5, 1e9)]
    assert divided([LayerCost(1, 10, 1)] * 12, NOTHING, NOTHING, on) == (2, 10)


def test_memory_bounds_what_bandwidth_would_have() -> None:
    on = [Device(1, 1e9, 100), Device(9, 1e9, 4)]
    assert divided([LayerCost(1, 0, 1)] * 10, NOTHING, NOTHING, on) == (6, 4)
    assert divided([LayerCost(1, 0, 1)] * 10, NOTHING, LayerCost(0, 0, 2), on) == (8, 2)


def test_a_head_is_as_good_as_layers() -> None:
    """An embedding is held, and a step reads rows of it alone."""
    on = [Device(1, 1e9, 1e9)] * 2
    assert divided([LayerCost(1, 0, 1)] * 10, LayerCost(0, 0, 4), LayerCost(4, 0, 4), on) == (7, 3)
    assert divided([LayerCost(1, 0, 1)] * 10, LayerCost(0, 0, 4), LayerCost(40, 0, 4), on) == (9, 1)


def test_stages_before_a_heavy_head_are_alike() -> None:
    on = [Device(1, 1e9, 1e9)] * 3
    assert divided([LayerCost(1, 0, 1)] * 9, NOTHING, LayerCost(20, 0, 1), on) == (4, 4, 1)


@pytest.mark.parametrize(
    ("layers", "on", "said"),
    [
        (2, [Device(1, 1, 1e9)] * 3, "3 stages are more than the 2 layers"),
        (4, [Device(1, 1, 1)] * 2, "do not fit 2 stages"),
        (4, [Device(1, 1, 1e9), Device(1, 1, 0)], "do not fit 2 stages"),
    ],
)
def test_what_is_impossible_is_refused_by_name(layers: int, on: list[Device], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        divided([LayerCost(1, 1, 1)] * layers, NOTHING, NOTHING, on)
    assert refused.value.param == "pipeline_parallel"
