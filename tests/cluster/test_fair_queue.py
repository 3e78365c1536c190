"""Turns among tenants: nobody waits while there is room, nobody waits for ever, and shares are those of the weights."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.cluster.routing.queueing.fair_queue import FairQueue

BIG = 10**9
tenants = st.sampled_from("abc")
tokens = st.integers(1, 500)
several = st.lists(tokens, min_size=5, max_size=40)
weights = st.fixed_dictionaries({name: st.floats(0.1, 10.0) for name in "abc"})


def a_queue(given_weights: dict[str, float] | None = None, requests: int = BIG, most: int = BIG) -> FairQueue[int]:
    return FairQueue(given_weights or {}, requests, most)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(weights, st.lists(st.tuples(tenants, tokens, st.integers(-3, 3)) | st.none(), max_size=80))
def test_every_one_has_its_turn_once_and_a_turn_is_never_refused(
    given_weights: dict[str, float], actions: list[tuple[str, int, int] | None]
) -> None:
    queue, waiting, had = a_queue(given_weights), set[int](), []
    for number, action in enumerate(actions):
        if action is not None:
            queue.push(number, action[0], action[1], priority=action[2])
            waiting.add(number)
        elif waiting:
            had.append(queue.pop().item)
            waiting.remove(had[-1])
        assert len(queue) == len(waiting)
    while waiting:
        had.append(queue.pop().item)
        waiting.remove(had[-1])
    assert queue.head() is None
    assert queue.tokens == 0
    assert len(set(had)) == len(had)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(
    weights, st.lists(tokens, min_size=5, max_size=40), st.lists(tokens, min_size=5, max_size=40), st.integers(1, 40)
)
def test_two_that_wait_have_shares_by_weight_within_one_request(
    given_weights: dict[str, float], one: list[int], two: list[int], turns: int
) -> None:
    queue = a_queue(given_weights)
    for tenant, sizes in (("a", one), ("b", two)):
        for size in sizes:
            queue.push(0, tenant, size)
    got: Counter[str] = Counter()
    left = {"a": len(one), "b": len(two)}
    for _ in range(turns):
        if not all(left.values()):
            return  # one that waits no more has what it wanted
        entry = queue.pop()
        left[entry.tenant] -= 1
        got[entry.tenant] += entry.tokens
        apart = abs(got["a"] / given_weights["a"] - got["b"] / given_weights["b"])
        assert apart <= max(one) / given_weights["a"] + max(two) / given_weights["b"] + 1e-6


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.integers(1, 60), tokens, tokens)
def test_who_comes_late_waits_for_no_more_than_one_of_each_other(before: int, theirs: int, own: int) -> None:
    queue = a_queue()
    for _ in range(before):
        queue.push(0, "a", theirs)
        queue.push(0, "b", theirs)
    for _ in range(before):
        queue.pop()
    queue.push(1, "c", own)
    turns = [queue.pop().item for _ in range(len(queue))]
    assert turns.index(1) <= 2


def test_who_was_idle_has_saved_nothing_up() -> None:
    queue = a_queue()
    for _ in range(20):
        queue.push(0, "a", 100)
    for _ in range(10):
        queue.pop()
    for _ in range(10):
        queue.push(1, "b", 100)
    assert sum(queue.pop().item for _ in range(10)) in (5, 6)


def test_priority_decides_within_a_tenant_alone() -> None:
    queue = a_queue()
    queue.push(1, "a", 10, priority=0)
    queue.push(2, "a", 10, priority=5)
    queue.push(3, "a", 10, priority=5)
    queue.push(4, "b", 10, priority=-5)
    turns = [queue.pop().item for _ in range(4)]
    assert [turn for turn in turns if turn != 4] == [2, 3, 1]
    assert turns.index(4) <= 1


def test_the_same_pushes_have_the_same_turns() -> None:
    def turns() -> list[int]:
        queue = a_queue({"b": 2.0})
        for number in range(60):
            queue.push(number, "abc"[number * 7 % 3], 1 + number * 13 % 50, priority=number % 2)
        return [queue.pop().item for _ in range(60)]

    assert turns() == turns()


def test_one_that_comes_back_is_next_and_pays_no_more() -> None:
    queue = a_queue()
    for number in range(3):
        queue.push(number, "a", 100)
        queue.push(10 + number, "b", 100)
    first = queue.pop()
    queue.push(first.item, first.tenant, 100, is_retry=True)
    others = [queue.pop().item for _ in range(2)]
    assert first.item in others
    assert len({item // 10 for item in others}) == 2, "and the other tenant has not lost its turn"


@settings(derandomize=True, max_examples=80, deadline=None)
@given(weights, st.integers(1, 6), st.integers(100, 1500), st.lists(st.tuples(tenants, tokens), max_size=60))
def test_bounds_hold_and_room_is_taken_from_who_has_most(
    given_weights: dict[str, float], requests: int, most: int, pushes: list[tuple[str, int]]
) -> None:
    queue = a_queue(given_weights, requests, most)
    for number, (tenant, size) in enumerate(pushes):
        before = sorted(each.item for each in queue)
        entry, left = queue.push(number, tenant, size)
        assert len(queue) <= requests
        assert queue.tokens <= most or len(queue) == 1
        assert all(each.tenant != tenant for each in left)
        if entry is None:
            assert not left
            assert sorted(each.item for each in queue) == before, "who was to leave for it has not left"
        else:
            assert entry in list(queue)


def test_one_tenant_cannot_keep_another_out() -> None:
    queue = a_queue(requests=10)
    for number in range(10):
        queue.push(number, "a", 100)
    assert queue.push(10, "a", 100) == (None, [])
    for number in range(5):
        entry, left = queue.push(20 + number, "b", 100)
        assert entry is not None
        assert [each.item for each in left] == [9 - number], "who came last leaves first"
    assert queue.push(30, "b", 100) == (None, [])


def test_a_weight_is_above_nothing() -> None:
    with pytest.raises(AssertionError):
        a_queue({"a": 0.0})
