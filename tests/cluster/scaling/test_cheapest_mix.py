"""Capacity of a replica, and the cheapest mix that carries all: monotone, and equal to brute force."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from motley.cluster.fleet.scaling.cheapest_mix import ReplicaClass, cheapest_counts
from motley.cluster.fleet.scaling.replica_capacity import OfferedLoad, carried_share
from motley.cluster.routing.prediction.latency_model import PROFILED_BATCH_SIZES, ReplicaSpeed, Slo

SLO = Slo(3.0, 0.1)


def a_speed(factor=1.0, **fields):
    speed = ReplicaSpeed(
        prefill_tokens_per_s=4000 * factor,
        decode_s=tuple((0.010 + 0.0003 * batch) / factor for batch in PROFILED_BATCH_SIZES), context_s=1e-8 / factor,
        chunk=512, max_running=64, kv_tokens=200_000,
    )  # fmt: skip
    return replace(speed, **fields)


factors = st.floats(0.1, 8.0)
loads = st.builds(
    lambda requests, prompt, output: OfferedLoad(requests, requests * prompt, requests * output),
    st.floats(0.1, 100.0), st.floats(1.0, 4000.0), st.floats(1.0, 1000.0),
)  # fmt: skip
law = settings(derandomize=True, max_examples=150, deadline=None)


@law
@given(factors, loads, st.floats(1.0, 3.0), st.floats(1.0, 3.0))
def test_more_to_carry_is_never_a_greater_share_of_it(factor, load, prompts, answers):
    more = OfferedLoad(load.requests, load.prompt_tokens * prompts, load.output_tokens * answers)
    assert carried_share(a_speed(factor), SLO, more) <= carried_share(a_speed(factor), SLO, load) * (1 + 1e-9)


@law
@given(factors, loads, st.floats(1.0, 3.0))
def test_a_faster_replica_or_a_looser_objective_never_carries_less(factor, load, by):
    share = carried_share(a_speed(factor), SLO, load) * (1 - 1e-9)
    assert carried_share(a_speed(factor * by), SLO, load) >= share
    assert carried_share(a_speed(factor), Slo(3.0 * by, 0.1), load) >= share
    assert carried_share(a_speed(factor), Slo(3.0, 0.1 * by), load) >= share


@law
@given(factors, loads, st.floats(0.5, 20.0))
def test_twice_the_load_is_half_the_share(factor, load, by):
    share = carried_share(a_speed(factor), SLO, load)
    assert carried_share(a_speed(factor), SLO, load.times(by)) == pytest.approx(share / by)


def test_what_is_carried_is_within_what_the_card_can_do():
    """Tokens of prompts below its prefill rate, answers below batch over step, sequences within its KV."""
    load = OfferedLoad(1.0, 500.0, 150.0)
    share = carried_share(a_speed(), SLO, load)
    assert 0 < share * 500 < 4000
    assert 0 < share * 150 < 64 / 0.0292
    assert carried_share(a_speed(kv_tokens=640), SLO, load) < share / 4
    assert carried_share(a_speed(kv_tokens=600), SLO, load) == 0


def test_a_card_too_slow_for_the_objectives_carries_nothing():
    load = OfferedLoad(1.0, 500.0, 150.0)
    assert carried_share(a_speed(), Slo(3.0, 0.005), load) == 0  # no step is so short
    assert carried_share(a_speed(), Slo(0.1, 0.1), load) == 0  # the prompt alone takes longer
    assert carried_share(a_speed(), SLO, OfferedLoad(1.0, 20_000.0, 10.0)) == 0


classes = st.lists(
    st.builds(
        lambda cost, share, minimum, more: ReplicaClass(cost, share, minimum, minimum + more),
        st.sampled_from([0.0, 0.2, 0.35, 0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.05, 0.21, 0.3, 0.34, 0.6, 1.7]),
        st.integers(0, 1), st.integers(0, 4),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


def cost_of(some, counts):
    return sum(each.cost * count for each, count in zip(some, counts, strict=True))


def carried_by(some, counts):
    return sum(each.share * count for each, count in zip(some, counts, strict=True))


@law
@given(classes, st.integers(0, 2))
def test_it_costs_what_the_cheapest_found_by_trying_all_costs(some, least):
    counts = cheapest_counts(some, min_replicas=least)
    assert all(each.minimum <= count <= each.maximum for each, count in zip(some, counts, strict=True))
    all_of_them = itertools.product(*(range(each.minimum, each.maximum + 1) for each in some))
    useful = [each.share > 0 for each in some]
    enough = [
        tried for tried in all_of_them
        if carried_by(some, tried) >= 1 - 1e-9 and sum(itertools.compress(tried, useful)) >= least
    ]  # fmt: skip
    if enough:
        assert counts in enough
        assert cost_of(some, counts) == pytest.approx(min(cost_of(some, tried) for tried in enough))
    else:  # all that is of any use
        assert counts == tuple(each.maximum if each.share else each.minimum for each in some)


@law
@given(classes, st.floats(1.0, 4.0))
def test_more_load_never_costs_less(some, by):
    heavier = [replace(each, share=each.share / by) for each in some]
    assume(carried_by(heavier, [each.maximum for each in heavier]) >= 1)
    assert cost_of(some, cheapest_counts(some)) <= cost_of(some, cheapest_counts(heavier)) + 1e-9


@law
@given(classes, st.integers(0, 3), st.floats(0.2, 1.0), st.floats(1.0, 2.0))
def test_a_slower_and_dearer_class_is_not_taken_while_there_is_a_better_one(some, which, slower, dearer):
    better = some[which % len(some)]
    assume(better.share > 0 and (slower < 0.99 or (dearer > 1.01 and better.cost > 0)))
    worse = ReplicaClass(better.cost * dearer, better.share * slower, 0, 5)
    for order in (1, -1):
        mixed = [*some, worse][::order]
        counts = cheapest_counts(mixed)[::order]
        if carried_by(mixed[::order], counts) >= 1 - 1e-9 and counts[-1]:
            assert counts[which % len(some)] == better.maximum
