"""Decisions: bounds, generations, and that nothing is changed by what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.cluster.fleet.control.state import decisions
from motley.cluster.fleet.control.state.control_state import (
    MAX_EVENTS,
    ControlState,
    FleetEvent,
    PolicyPlan,
    PoolPlan,
    PoolRollout,
    ReplicaDrain,
    decode_state,
    encode_state,
)
from motley.cluster.service_errors import Conflict, NotConfirmed
from motley.replicas.errors import InvalidRequest, MotleyError, NotFound

HOW: dict[str, Any] = {"by": "test", "reason": "why"}
POOLS = {"cpu": PoolPlan(2, 1, 4), "gpu": PoolPlan(0, 0, 2)}

plans = st.builds(
    lambda numbers, cost, model: PoolPlan(numbers[1], numbers[0], numbers[2], cost, model=model),
    st.lists(st.integers(0, 50), min_size=3, max_size=3).map(sorted),
    st.floats(0, 100),
    st.text(max_size=8),
)
drains = st.builds(ReplicaDrain, st.sampled_from(["a", "b"]), st.booleans(), st.floats(0, 1e9), st.booleans())
states = st.builds(
    lambda pools, drained, rolls, generation, told: ControlState(
        pools, generation, drains=drained, rolls=rolls, settled=frozenset(pools)
    ).with_event(told, "scaled", pool="a"),
    st.dictionaries(st.sampled_from(["a", "b"]), plans, min_size=1),
    st.dictionaries(st.text(min_size=1, max_size=4), drains, max_size=3),
    st.dictionaries(st.sampled_from(["a", "b"]), st.builds(PoolRollout, st.text(max_size=4)), max_size=1),
    st.integers(0, 2**40),
    st.floats(0, 1e9),
)


@given(states)
def test_what_is_kept_is_read_back(state: ControlState) -> None:
    assert decode_state(encode_state(state)) == state


def test_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="another version"):
        decode_state(encode_state(ControlState()).replace(b'"schema": 1', b'"schema": 2'))


@given(states, st.sampled_from(["a", "b", "c"]), st.integers(-3, 60), st.booleans(), st.none() | st.integers(0, 5))
def test_a_target_is_within_bounds_and_each_decision_is_one_generation(
    state: ControlState, pool: str, replicas: int, zero: bool, expected: int | None
) -> None:
    try:
        after = decisions.scale(state, 1.0, pool, replicas, allow_zero=zero, generation=expected, **HOW)
    except MotleyError:
        return
    plan = after.pools[pool]
    assert plan.target == replicas
    assert plan.minimum <= replicas <= plan.maximum
    assert expected in (None, state.generation)
    changed = replicas != state.pools[pool].target
    assert (after == state) is not changed
    assert after.generation == state.generation + changed
    assert after.sequence == state.sequence + changed
    assert any(each.target for each in after.pools.values()) or zero or not changed


@pytest.mark.parametrize(
    ("pool", "replicas", "more", "error", "words"),
    [
        ("cpu", -1, {}, InvalidRequest, "from 1 to 4"),
        ("cpu", 5, {}, InvalidRequest, "from 1 to 4"),
        ("cpu", 2**31, {}, InvalidRequest, "2147483648 is not accepted"),
        ("cpus", 1, {}, NotFound, "there are: cpu, gpu"),
        ("cpu", 3, {"generation": 6}, Conflict, "it is 7 by now, not 6"),
        ("cpu", 3, {"reason": "x" * 201}, InvalidRequest, "reason"),
        ("cpu", 3, {"reason": "a\nb"}, InvalidRequest, "reason"),
        ("cpu", 3, {"reason": ""}, InvalidRequest, "reason: it is missing"),
    ],
)
def test_refusals(pool: str, replicas: int, more: dict[str, Any], error: type[MotleyError], words: str) -> None:
    with pytest.raises(error, match=words):
        decisions.scale(ControlState(POOLS, 7), 0.0, pool, replicas, **{**HOW, **more})


def test_none_left_must_be_asked_for() -> None:
    state = ControlState({"cpu": PoolPlan(1, 0, 4)})
    with pytest.raises(NotConfirmed, match="allow_zero"):
        decisions.scale(state, 0.0, "cpu", 0, **HOW)
    with pytest.raises(NotConfirmed, match="allow_zero"):
        decisions.drain(state, 0.0, "r", "cpu", remove=True, **HOW)
    assert decisions.scale(state, 0.0, "cpu", 0, allow_zero=True, **HOW).pools["cpu"].target == 0
    beside = ControlState({**state.pools, "gpu": PoolPlan(1, 0, 4)})
    assert decisions.scale(beside, 0.0, "cpu", 0, **HOW).pools["cpu"].target == 0, "another pool still serves"


def test_bounds_move_the_target_into_them() -> None:
    after = decisions.set_policy(ControlState(POOLS, 7), 0.0, None, [("cpu", 3, 9)], **HOW)
    assert after.pools["cpu"] == PoolPlan(3, 3, 9)
    assert [event.kind for event in after.events] == ["scaled", "policy"]
    for least, most in ((-1, 2), (3, 2), (0, 10_001)):
        with pytest.raises(InvalidRequest, match="bounds"):
            decisions.set_policy(ControlState(POOLS, 7), 0.0, None, [("cpu", least, most)], **HOW)
    assert decisions.set_policy(after, 0.0, PolicyPlan(), [("cpu", 3, 9)], **HOW) == after


def test_a_drain_that_removes_takes_one_away_once() -> None:
    state = ControlState(POOLS)
    after = decisions.drain(state, 5.0, "r1", "cpu", remove=True, timeout_s=60.0, **HOW)
    assert (after.pools["cpu"].target, after.leaving("cpu")) == (1, 1)
    assert after.drains["r1"] == ReplicaDrain("cpu", True, 65.0)
    assert decisions.drain(after, 6.0, "r1", "cpu", remove=True, **HOW) == after
    with pytest.raises(InvalidRequest, match="at least 1"):
        decisions.drain(after, 6.0, "r2", "cpu", remove=True, **HOW)
    for seconds in (-1.0, float("nan"), float("inf"), 1e9):
        with pytest.raises(InvalidRequest, match="timeout_s"):
            decisions.drain(state, 5.0, "r1", "cpu", remove=False, timeout_s=seconds, **HOW)


def test_what_a_drain_is_asked_for_later_counts_too() -> None:
    state = decisions.drain(ControlState(POOLS), 5.0, "r1", "cpu", remove=False, timeout_s=60.0, **HOW)
    assert decisions.drain(state, 6.0, "r1", "cpu", remove=False, **HOW) == state
    sooner = decisions.drain(state, 6.0, "r1", "cpu", remove=False, timeout_s=1.0, **HOW)
    assert (sooner.drains["r1"], sooner.generation) == (ReplicaDrain("cpu", False, 7.0), 2)
    assert sooner.events[-1].kind == "draining"
    removed = decisions.drain(state, 6.0, "r1", "cpu", remove=True, **HOW)
    assert removed.drains["r1"] == ReplicaDrain("cpu", True, 65.0), "its time is as it was"
    assert (removed.pools["cpu"].target, removed.leaving("cpu"), removed.generation) == (1, 1, 2)
    assert [event.kind for event in removed.events] == ["draining", "scaled", "draining"]
    assert decisions.drain(removed, 7.0, "r1", "cpu", remove=False, **HOW) == removed
    both = decisions.drain(state, 6.0, "r1", "cpu", remove=True, timeout_s=1.0, **HOW)
    assert both.drains["r1"] == ReplicaDrain("cpu", True, 7.0)
    with pytest.raises(InvalidRequest, match="at least 1"):
        decisions.drain(replace(state, pools={"cpu": PoolPlan(1, 1, 4)}), 6.0, "r1", "cpu", remove=True, **HOW)
    with pytest.raises(NotConfirmed, match="allow_zero"):
        decisions.drain(replace(state, pools={"cpu": PoolPlan(1, 0, 4)}), 6.0, "r1", "cpu", remove=True, **HOW)


def test_a_pool_is_rolled_once_at_a_time() -> None:
    after = decisions.roll(ControlState(POOLS), 0.0, "cpu", "", "v1", **HOW)
    with pytest.raises(Conflict, match="already"):
        decisions.roll(after, 0.0, "cpu", "", "v2", **HOW)


@given(st.integers(0, 6), st.lists(st.booleans(), max_size=6), st.integers(0, 6))
def test_as_many_go_as_are_too_many(target: int, removing: list[bool], more: int) -> None:
    """Whatever drains already: after it, those that serve and stay are as many as are wanted, or all there are."""
    draining = {f"d{number}": ReplicaDrain("cpu", remove, 9.0) for number, remove in enumerate(removing)}
    running = [*draining, *(f"r{number}" for number in range(more))]
    state = ControlState({"cpu": PoolPlan(target, 0, 50)}, drains=draining)
    gone = decisions.choose_leaving(state, "cpu", running)
    after = decisions.start_leaving(state, 0.0, "cpu", gone, len(running), 9.0)
    staying = len(running) - after.leaving("cpu")
    assert staying == min(target, len(running) - state.leaving("cpu"))
    assert not set(gone) & set(draining)


def test_a_new_deployment_keeps_targets_and_a_new_process_keeps_bounds() -> None:
    state = decisions.take_over_deployment(ControlState(), 0.0, "first", POOLS, PolicyPlan())
    state = decisions.scale(state, 0.0, "cpu", 4, **HOW)
    state = decisions.set_policy(state, 0.0, None, [("cpu", 0, 6)], **HOW)
    assert decisions.take_over_deployment(state, 0.0, "first", POOLS, PolicyPlan("queue")) == state
    again = decisions.take_over_deployment(state, 0.0, "second", {"cpu": PoolPlan(1, 1, 3)}, PolicyPlan("queue"))
    assert again.pools == {"cpu": PoolPlan(3, 1, 3)}
    assert again.policy.name == "queue"


def test_a_deployment_is_a_decision_with_number_author_and_reason() -> None:
    first = decisions.take_over_deployment(ControlState(), 5.0, "first", POOLS, PolicyPlan())
    assert first.events == (
        FleetEvent(
            1, 5.0, "deployed", generation=1, by="motley serve", reason="cpu from 1 to 4, new; gpu from 0 to 2, new"
        ),
    )
    first = replace(first, settled=frozenset(POOLS))
    pools = {"cpu": PoolPlan(1, 0, 1, 0.5), "tpu": PoolPlan(1, cold_start_s=9)}
    second = decisions.take_over_deployment(first, 6.0, "second", pools, PolicyPlan("slo"))
    assert second.generation == 2
    assert [(one.kind, one.pool, one.before, one.after, one.by) for one in second.events[1:]] == [
        ("scaled", "cpu", 2, 1, "motley serve"), ("deployed", "", 0, 0, "motley serve")
    ]  # fmt: skip
    assert second.events[-1].reason == "policy slo; cpu from 0 to 1; cpu at 0.5 an hour; tpu from 0 to 1, new; no gpu"
    assert second.settled == frozenset()
    with pytest.raises(Conflict, match="it is 2 by now, not 1"):
        decisions.scale(second, 7.0, "cpu", 0, generation=1, **HOW)
    same = decisions.take_over_deployment(
        second, 7.0, "third", {**pools, "cpu": PoolPlan(0, 0, 1, 0.5)}, PolicyPlan("slo")
    )
    assert same == replace(second, deployment="third"), "nothing of it is new"
    other = {name: replace(plan, said="int4", cold_start_s=7.0) for name, plan in pools.items()}
    assert decisions.take_over_deployment(second, 7.0, "third", other, PolicyPlan("slo")).events[-1].reason == (
        "cpu of int4; cpu starts in 7 s; tpu of int4; tpu starts in 7 s"
    )
    many = decisions.take_over_deployment(
        ControlState(), 0.0, "many", {f"pool-{at}": PoolPlan(1) for at in range(99)}, PolicyPlan()
    )
    assert len(many.events[-1].reason) == decisions.MAX_REASON


@given(states, states, st.sampled_from(["fixed", "slo"]))
def test_whatever_a_deployment_changes_is_one_generation(state: ControlState, other: ControlState, policy: str) -> None:
    after = decisions.take_over_deployment(state, 0.0, "another", other.pools, PolicyPlan(policy))
    said = [(name, one.minimum, one.maximum, one.target, one.cost_per_hour) for name, one in after.pools.items()]
    was = [(name, one.minimum, one.maximum, one.target, one.cost_per_hour) for name, one in state.pools.items()]
    changed = sorted(said) != sorted(was) or after.policy != state.policy
    assert after.generation == state.generation + changed
    assert (after.sequence > state.sequence) is changed
    assert all(one.by and one.reason for one in after.events[len(state.events) :])


def test_events_are_kept_up_to_a_number() -> None:
    state = ControlState(POOLS)
    for _ in range(MAX_EVENTS + 5):
        state = state.with_event(0.0, "settled", pool="cpu")
    assert len(state.events) == MAX_EVENTS
    assert state.events[-1] == FleetEvent(MAX_EVENTS + 5, 0.0, "settled", pool="cpu")
