"""Layers of unequal stages: as good as the best of all ways there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from motley.replicas.errors import InvalidRequest
from motley.replicas.shards.partition import Cost, StageDevice, partition, stage_seconds

NOTHING = Cost(0, 0, 0)
costs = st.builds(Cost, st.integers(0, 50), st.integers(0, 50), st.integers(0, 20))
devices = st.builds(StageDevice, st.integers(1, 9), st.integers(1, 9), st.integers(0, 90))


def ways(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, layers)))


def seconds(
    sizes: Sequence[int], layers: Sequence[Cost], first: Cost, last: Cost, on: Sequence[StageDevice]
) -> list[float]:
    """Of each stage, counted one by one."""
    left = list(layers)
    found = []
    for stage, (size, device) in enumerate(zip(sizes, on, strict=True)):
        own = [left.pop(0) for _ in range(size)]
        own += [first] if stage == 0 else []
        own += [last] if stage == len(on) - 1 else []
        found.append(stage_seconds(device, own))
    assert not left
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(costs, min_size=1, max_size=7), costs, costs, st.lists(devices, min_size=1, max_size=4))
def test_no_other_way_is_better(layers: list[Cost], first: Cost, last: Cost, on: list[StageDevice]) -> None:
    """Every way is tried; where none fits, that is said."""
    by_way = {way: seconds(way, layers, first, last, on) for way in ways(len(layers), len(on))}
    slowest = min((max(each) for each in by_way.values()), default=math.inf)
    if slowest == math.inf:
        with pytest.raises(InvalidRequest) as refused:
            partition(layers, first, last, on)
        assert refused.value.param == "pipeline_parallel"
        return
    found = partition(layers, first, last, on)
    assert max(by_way[found]) == slowest
    alike = min(sum(t * t for t in each) for each in by_way.values() if max(each) == slowest)
    assert sum(t * t for t in by_way[found]) == pytest.approx(alike)


def test_a_device_of_three_times_the_bandwidth_has_three_times_the_layers() -> None:
    on = [StageDevice(1, 1e9, 1e9), StageDevice(3, 1e9, 1e9)]
    assert partition([Cost(1, 0, 1)] * 24, NOTHING, NOTHING, on) == (6, 18)


def test_what_computes_slowly_has_fewer_where_computing_takes_the_time() -> None:
    on = [StageDevice(100, 1, 1e9), StageDevice(100, 5, 1e9)]
    assert partition([Cost(1, 10, 1)] * 12, NOTHING, NOTHING, on) == (2, 10)


def test_memory_bounds_what_bandwidth_would_have() -> None:
    on = [StageDevice(1, 1e9, 100), StageDevice(9, 1e9, 4)]
    assert partition([Cost(1, 0, 1)] * 10, NOTHING, NOTHING, on) == (6, 4)
    assert partition([Cost(1, 0, 1)] * 10, NOTHING, Cost(0, 0, 2), on) == (8, 2)


def test_a_head_is_as_good_as_layers() -> None:
    """An embedding is held, and a step reads rows of it alone."""
    on = [StageDevice(1, 1e9, 1e9)] * 2
    assert partition([Cost(1, 0, 1)] * 10, Cost(0, 0, 4), Cost(4, 0, 4), on) == (7, 3)
    assert partition([Cost(1, 0, 1)] * 10, Cost(0, 0, 4), Cost(40, 0, 4), on) == (9, 1)


def test_stages_before_a_heavy_head_are_alike() -> None:
    on = [StageDevice(1, 1e9, 1e9)] * 3
    assert partition([Cost(1, 0, 1)] * 9, NOTHING, Cost(20, 0, 1), on) == (4, 4, 1)


@pytest.mark.parametrize(
    ("layers", "on", "said"),
    [
        (2, [StageDevice(1, 1, 1e9)] * 3, "3 stages are more than the 2 layers"),
        (4, [StageDevice(1, 1, 1)] * 2, "do not fit 2 stages"),
        (4, [StageDevice(1, 1, 1e9), StageDevice(1, 1, 0)], "do not fit 2 stages"),
    ],
)
def test_what_is_impossible_is_refused_by_name(layers: int, on: list[StageDevice], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        partition([Cost(1, 1, 1)] * layers, NOTHING, NOTHING, on)
    assert refused.value.param == "pipeline_parallel"
