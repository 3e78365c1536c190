"""The choice of a replica by predicted time: monotone, alike for equals, and never one that cannot serve."""

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.cluster.routing.policy.predicted_latency import PredictedLatency
from motley.cluster.routing.prediction.latency_model import (
    LatencyModel,
    LatencyPrediction,
    ReplicaSpeed,
    RoutingQuery,
    Slo,
)
from motley.cluster.routing.prefix_index.prefix_index import PrefixIndex
from motley.replicas.types import PROFILED_BATCH_SIZES, ReplicaLoad

SLO = Slo(3.0, 0.1)


def a_speed(factor=1.0):
    return ReplicaSpeed(
        prefill_tokens_per_s=4000 * factor,
        decode_s=tuple((0.010 + 0.0003 * batch) / factor for batch in PROFILED_BATCH_SIZES), context_s=1e-8 / factor,
        chunk=512, max_running=64, kv_tokens=200_000,
    )  # fmt: skip


def a_directory(*factors):
    return LatencyModel([a_speed(factor) for factor in factors], SLO)


def rank(directory, now, query, *, allow_late=False, seed=0):
    """Motley's own policy: predictions for the best replicas, best first; with `late` also those that come too late."""
    replicas = directory.candidates(now, query, allow_late=allow_late)
    return replicas.predictions(PredictedLatency(random.Random(seed)).order(query, replicas))


def a_load(running=0, waiting=0, queued=0, free=12_000, total=12_500):
    return ReplicaLoad(running, waiting, queued, free, total)


factors = st.floats(0.2, 5.0)
loads = st.builds(a_load, st.integers(0, 64), st.integers(0, 20), st.integers(0, 20_000))


@settings(derandomize=True, max_examples=80, deadline=None)
@given(factors, factors, loads, st.integers(1, 8000))
def test_a_faster_replica_with_the_same_load_is_never_predicted_to_take_longer(one, two, load, prompt):
    directory = a_directory(one, two)
    for replica in (0, 1):
        directory.heard(replica, load, 1.0)
    ttft, tpot = directory.predict(1.0, RoutingQuery(prompt))
    slow, fast = (0, 1) if one <= two else (1, 0)
    assert ttft[fast] <= ttft[slow] * (1 + 1e-9)
    assert tpot[fast] <= tpot[slow] * (1 + 1e-9)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(loads, st.integers(1, 4000), st.integers(1, 4000))
def test_more_to_do_never_takes_less_time(load, prompt, more):
    directory = a_directory(1.0, 1.0)
    directory.heard(0, load, 1.0)
    directory.heard(1, load, 1.0)
    directory.sent(1.1, 1, more)
    ttft, tpot = directory.predict(1.1, RoutingQuery(prompt))
    assert ttft[0] <= ttft[1]
    assert tpot[0] <= tpot[1] * (1 + 1e-9)
    longer, _ = directory.predict(1.1, RoutingQuery(prompt + more))
    assert (longer >= ttft).all()


def test_what_a_replica_holds_of_the_prompt_counts():
    directory = a_directory(1.0, 1.0, 1.0)
    ranked = rank(directory, 0.0, RoutingQuery(3000, {1: 2900}))
    assert ranked[0].replica == 1
    assert ranked[0].ttft_s < ranked[1].ttft_s / 5


def test_affinity_ends_where_it_no_longer_pays():
    directory = a_directory(1.0, 1.0)
    directory.heard(1, a_load(running=20, queued=9000), 0.0)
    assert rank(directory, 0.0, RoutingQuery(3000, {1: 2900}))[0].replica == 0


def test_equals_are_drawn_and_the_same_seed_draws_the_same():
    chosen = [rank(a_directory(1, 1, 1, 1), 0.0, RoutingQuery(100), seed=seed)[0].replica for seed in range(40)]
    assert set(chosen) == {0, 1, 2, 3}
    assert chosen == [rank(a_directory(1, 1, 1, 1), 0.0, RoutingQuery(100), seed=seed)[0].replica for seed in range(40)]


def test_one_that_drains_is_never_chosen():
    directory = a_directory(5.0, 1.0)
    directory.set_usable(0, usable=False)
    assert [each.replica for each in rank(directory, 0.0, RoutingQuery(100))] == [1]
    directory.set_usable(1, usable=False)
    assert rank(directory, 0.0, RoutingQuery(100)) == []


def test_what_nobody_can_do_in_time_goes_nowhere():
    directory = a_directory(0.2, 0.2)
    assert rank(directory, 0.0, RoutingQuery(200))
    assert rank(directory, 0.0, RoutingQuery(200_000)) == []


def test_what_was_sent_counts_until_it_is_heard_of():
    directory = a_directory(1.0, 1.0)
    before, _ = directory.predict(1.0, RoutingQuery(100))
    directory.sent(1.0, 0, 4000)
    sent, _ = directory.predict(1.0, RoutingQuery(100))
    assert sent[0] > before[0] + 0.5
    directory.heard(0, a_load(), of=0.9)  # older than what was sent
    assert directory.predict(1.0, RoutingQuery(100))[0][0] == pytest.approx(sent[0], rel=0.05)
    directory.heard(0, a_load(), of=1.1)
    assert directory.predict(1.1, RoutingQuery(100))[0][0] == pytest.approx(before[0], rel=0.05)


def test_predictions_follow_what_is_observed():
    directory = a_directory(1.0, 1.0)
    before, pace = directory.predict(0.0, RoutingQuery(2000))
    for _ in range(200):
        predicted = next(
            each for each in rank(directory, 0.0, RoutingQuery(2000), allow_late=True) if each.replica == 0
        )
        directory.observe_ttft(0, predicted, 1.4 * float(before[0]))
        directory.observe_tpot(0, predicted, 1.4 * float(pace[0]), 100)
    after, after_pace = directory.predict(0.0, RoutingQuery(2000))
    assert after[0] == pytest.approx(1.4 * before[0], rel=0.1)
    assert after_pace[0] == pytest.approx(1.4 * pace[0], rel=0.1)
    assert after[1] == before[1]


def test_corrections_do_not_swing_while_many_requests_are_on_their_way():
    directory = a_directory(1.0)
    right = 1.4 * float(directory.predict(0.0, RoutingQuery(500))[1][0])
    on_their_way = deque()
    for _ in range(3000):
        on_their_way.append(rank(directory, 0.0, RoutingQuery(500), allow_late=True)[0])
        if len(on_their_way) > 400:
            directory.observe_tpot(0, on_their_way.popleft(), right, 100)
        assert 0.99 <= directory.off(0)[1] <= 1.41
    assert directory.off(0)[1] == pytest.approx(1.4, rel=0.01)
    directory.observe_tpot(0, on_their_way.popleft(), 0.0, 100)  # two tokens in one tick of the clock
    assert directory.off(0)[1] == pytest.approx(1.4, rel=0.01)


def test_margins_become_stricter_with_misses_and_stay_within_bounds():
    directory = a_directory(1.0)
    longest = max(n for n in range(100, 40_000, 100) if rank(directory, 0.0, RoutingQuery(n)))
    for _ in range(30):
        directory.observe_ttft(0, LatencyPrediction(0, 3.5, 0.05, 1.0), 3.5)  # as predicted, and too late
    assert max(n for n in range(100, 40_000, 100) if rank(directory, 0.0, RoutingQuery(n))) < longest
    for _ in range(10_000):
        directory.observe_ttft(0, LatencyPrediction(0, 1.0, 0.05, 1.0), 1.0)
    assert rank(directory, 0.0, RoutingQuery(longest))


def test_misses_count_by_the_time_that_they_came_in():
    """Reports of a fleet arrive seconds later, of many requests at once: a moment would halve the margin."""
    longest = {}
    for rate in (20, 2000):
        directory = a_directory(1.0)
        for number in range(4 * rate):
            directory.sent(number / rate, 0, 100)
            directory.begun(number / rate, 0, 100)
            directory.done(number / rate, 0)
        for _ in range(rate // 10):  # of what came in one second
            directory.observe_ttft(0, LatencyPrediction(0, 3.5, 0.05, 1.0), 3.5)  # as predicted, and too late
        longest[rate] = max(n for n in range(100, 40_000, 100) if rank(directory, 100.0, RoutingQuery(n)))
    assert longest[2000] == pytest.approx(longest[20], rel=0.05)


def a_jump(chunk=512):
    """Return step times as where kernels for few rows end: 65 rows take six times as long as 64, and hardly less than a
    full step.
    """
    decode_s = tuple(0.03 if batch <= 64 else 0.18 for batch in PROFILED_BATCH_SIZES)
    return ReplicaSpeed(
        prefill_tokens_per_s=chunk / 0.2, decode_s=decode_s, context_s=0.0, chunk=chunk, max_running=256,
        kv_tokens=200_000,
    )  # fmt: skip


def test_a_short_prompt_takes_a_step_and_a_long_one_whole_steps_and_a_rest():
    directory = LatencyModel([a_jump()], SLO)

    def ttft_s(tokens):
        return float(directory.predict(0.0, RoutingQuery(tokens))[0][0])

    assert ttft_s(20) == pytest.approx(0.03)
    assert ttft_s(100) == pytest.approx(0.18), "not a fifth of a full step"
    assert ttft_s(512) == pytest.approx(0.2)
    assert ttft_s(3 * 512) == pytest.approx(0.6)
    assert ttft_s(3 * 512 + 100) == pytest.approx(0.78)


def test_company_beyond_the_jump_is_not_between_what_was_measured_on_both_sides():
    directory = LatencyModel([a_jump()], None)
    paces = {}
    for running in (62, 63, 64, 66):
        directory.heard(0, a_load(running=running), 0.0)
        paces[running] = float(directory.predict(0.0, RoutingQuery(1))[1][0])
    assert paces[63] == pytest.approx(paces[62], rel=0.05)
    assert paces[64] > 4 * paces[63]
    assert paces[66] == pytest.approx(paces[64], rel=0.05)


@pytest.mark.parametrize("tokens", [50, 100, 400])
@pytest.mark.parametrize("per_s", [0.5, 3.0, 8.0])
def test_the_pace_is_that_of_steps_among_which_prompts_fall_as_they_come(tokens, per_s):
    """Against such steps one by one. Short prompts cost a step what long ones do: how many there are is what counts."""
    directory = LatencyModel([a_jump()], None)
    for _ in range(200):
        directory.sent(-100.0, 0, tokens)
        directory.begun(-100.0, 0, tokens)
    computed, now = 0, 0.0
    for second in range(30):  # heard of for long enough that the rate is what it is
        computed, now = computed + tokens * per_s, float(second)
        directory.heard(0, ReplicaLoad(20, 0, 0, 12_000, 12_500, prompt_tokens=round(computed)), now)
    predicted = float(directory.predict(now, RoutingQuery(1))[1][0])

    rng, clock, steps, waiting = random.Random(1), 0.0, 0, 0
    next_s = rng.expovariate(per_s)
    while clock < 4000:
        while next_s < clock:
            waiting, next_s = waiting + tokens, next_s + rng.expovariate(per_s)
        taken = min(waiting, 512 - 21)
        rows, waiting = 21 + taken, waiting - taken
        clock += 0.03 if rows <= 64 else 0.18 + (0.2 - 0.18) * max(0, rows - 256) / 256
        steps += 1
    assert predicted == pytest.approx(clock / steps, rel=0.06)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.lists(st.floats(1e-4, 0.5), min_size=len(PROFILED_BATCH_SIZES), max_size=len(PROFILED_BATCH_SIZES)),
    st.floats(10, 1e5), st.integers(64, 8192), loads, st.integers(1, 20_000), st.integers(0, 100_000),
)  # fmt: skip
def test_whatever_a_profile_says_no_step_is_faster_than_one_of_decodes_alone(
    decode_s, prefill, chunk, load, prompt, computed
):
    speed = ReplicaSpeed(
        prefill_tokens_per_s=prefill, decode_s=tuple(sorted(decode_s)), context_s=0.0, chunk=chunk, max_running=64,
        kv_tokens=200_000,
    )  # fmt: skip
    directory = LatencyModel([speed], SLO)
    directory.heard(0, ReplicaLoad(prompt_tokens=0, kv_blocks_free=9000, kv_blocks_total=10_000), 0.0)
    directory.heard(0, replace(load, prompt_tokens=computed), 1.0)
    ttft, tpot = directory.predict(1.0, RoutingQuery(prompt))
    assert ttft[0] > 0
    assert tpot[0] >= min(decode_s) * (1 - 1e-9)


def test_each_replica_has_prompts_of_its_own_length():
    """Slow cards get the short ones: with the fleet's mean they would seem to have few steps with any."""
    directory = LatencyModel([a_jump(), a_jump()], None)
    computed = 0
    for second in range(30):
        for replica, tokens in ((0, 80), (1, 800)):
            for _ in range(800 // tokens):
                directory.sent(float(second), replica, tokens)
                directory.begun(float(second), replica, tokens)
        computed += 800
        for replica in (0, 1):
            directory.heard(replica, ReplicaLoad(20, 0, 0, 12_000, 12_500, prompt_tokens=computed), second + 0.5)
    _, tpot = directory.predict(29.5, RoutingQuery(1))
    assert tpot[0] > 1.5 * tpot[1]


def test_prompts_in_line_are_computed_while_it_waits_for_a_place():
    """A replica that is full has both, and they do not add up."""
    directory = LatencyModel([a_speed()], None)
    ttft = {}
    for queued, waiting in ((0, 0), (12_000, 0), (0, 32), (12_000, 32)):
        directory.heard(0, a_load(running=64, waiting=waiting, queued=queued), 0.0)
        ttft[queued, waiting] = float(directory.predict(0.0, RoutingQuery(100))[0][0])
    assert ttft[0, 0] < ttft[0, 32]
    assert ttft[12_000, 32] == pytest.approx(max(ttft[12_000, 0], ttft[0, 32]), rel=0.05)


class TestPrefixes:
    CHAIN = tuple(bytes([n]) for n in range(10))

    def test_a_chain_is_followed_as_far_as_each_holds_it(self):
        view = PrefixIndex([100, 100, 100])
        view.add(0, self.CHAIN[:4])
        view.add(2, self.CHAIN)
        assert view.depths(self.CHAIN) == {0: 4, 2: 10}
        assert view.depths((b"other", *self.CHAIN)) == {}
        assert view.depths(()) == {}

    def test_the_oldest_is_forgotten_and_a_chain_from_its_end(self):
        view = PrefixIndex([6])
        view.add(0, self.CHAIN[:5])
        view.add(0, (b"a", b"b", b"c"))
        assert view.depths(self.CHAIN) == {0: 3}
        assert view.depths((b"a", b"b", b"c")) == {0: 3}

    def test_what_was_not_there_after_all_is_forgotten(self):
        view = PrefixIndex([100, 100])
        view.add(0, self.CHAIN)
        view.add(1, self.CHAIN)
        view.correct(0, self.CHAIN, 3)
        assert view.depths(self.CHAIN) == {0: 3, 1: 10}
        view.clear(1)
        assert view.depths(self.CHAIN) == {0: 3}

    @settings(derandomize=True, max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 8)), max_size=40))
    def test_it_agrees_with_a_plain_one(self, adds):
        view, plain = PrefixIndex([10_000] * 4), [set() for _ in range(4)]
        for replica, chain, length in adds:
            hashes = [f"{chain} {n}".encode() for n in range(length)]
            view.add(replica, hashes)
            plain[replica].update(hashes)
        for chain in range(5):
            hashes = [f"{chain} {n}".encode() for n in range(8)]
            depths = {r: sum(each in held for each in hashes) for r, held in enumerate(plain)}
            assert view.depths(hashes) == {r: depth for r, depth in depths.items() if depth}
