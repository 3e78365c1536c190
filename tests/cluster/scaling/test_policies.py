"""Scaling policies: within their bounds, without flapping, the same for the same, and with a reason each time."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.cluster.fleet.scaling.policy_registry import POLICIES, create_policy
from motley.cluster.fleet.scaling.rate_forecast import RateForecast
from motley.cluster.fleet.scaling.replica_capacity import OfferedLoad, carried_share
from motley.cluster.fleet.scaling.scaling_policy import FleetObservation, PoolObservation
from motley.cluster.routing.prediction.latency_model import PROFILED_BATCH_SIZES, ReplicaSpeed, Slo
from motley.replicas.errors import InvalidRequest

SLO = Slo(3.0, 0.1)
LOOK_S = 10.0
law = settings(derandomize=True, max_examples=40, deadline=None)


def a_speed(factor=1.0):
    return ReplicaSpeed(
        prefill_tokens_per_s=4000 * factor,
        decode_s=tuple((0.010 + 0.0003 * batch) / factor for batch in PROFILED_BATCH_SIZES), context_s=1e-8 / factor,
        chunk=512, max_running=64, kv_tokens=200_000,
    )  # fmt: skip


def a_pool(name, factor=1.0, cost=1.0, minimum=0, maximum=8, target=0, cold_start_s=60.0, **fields):
    state = {"ready": target, "starting": 0, "speed": a_speed(factor)} | fields
    return PoolObservation(name, minimum, maximum, target, cost_per_hour=cost, cold_start_s=cold_start_s, **state)


SMALL, LARGE = a_pool("small", 0.5, 0.4, maximum=12), a_pool("large", 3.0, 1.9)


class Stage:
    """Pools whose replicas come after their cold start, under a demand that is told."""

    def __init__(self, policy, pools, *, never=()):
        self.policy, self.never = policy, never
        self.pools = {pool.name: pool for pool in pools}
        self.started = {pool.name: [] for pool in pools}  # when each that starts began to
        self.now, self.said = 0.0, []

    def look(self, rate, prompt=500.0, output=150.0, **fields):
        told = policy_decides(self.policy, self.now, self.pools.values(), rate, prompt, output, **fields)
        for target in told:
            pool = self.pools[target.pool]
            assert pool.minimum <= target.replicas <= pool.maximum
            assert target.replicas != pool.target
            assert target.reason
            self.said.append((self.now, target))
            self._set(pool, target.replicas)
        self.now += LOOK_S
        for name, pool in self.pools.items():
            if name in self.never:
                continue
            up = [at for at in self.started[name] if at + pool.cold_start_s <= self.now]
            self.started[name] = self.started[name][len(up) :]
            self.pools[name] = replace(pool, ready=pool.ready + len(up), starting=len(self.started[name]))
        return told

    def _set(self, pool, target):
        coming = self.started[pool.name]
        while len(coming) + pool.ready < target:
            coming.append(self.now)
        while coming and len(coming) + pool.ready > target:
            coming.pop()
        self.pools[pool.name] = replace(pool, target=target, ready=min(pool.ready, target), starting=len(coming))

    def run(self, seconds, rate, **fields):
        until = self.now + seconds
        while self.now < until:
            self.look(rate(self.now) if callable(rate) else rate, **fields)
        return self

    @property
    def targets(self):
        return {name: pool.target for name, pool in self.pools.items()}

    def share(self, rate, only_ready=True):
        load = OfferedLoad(rate, rate * 500, rate * 150)
        return sum(
            (pool.ready if only_ready else pool.target) * carried_share(pool.speed, SLO, load)
            for pool in self.pools.values() if pool.speed
        )  # fmt: skip


def policy_decides(policy, now, pools, rate, prompt, output, **fields):
    return policy.decide(FleetObservation(now, tuple(pools), rate, rate * prompt, rate * output, **fields))


def slo_stage(*pools, never=(), **settings):
    return Stage(create_policy("slo", SLO, **settings), pools or (SMALL, LARGE), never=never)


pools = st.lists(
    st.builds(
        lambda factor, cost, minimum, more, ready, **fields: a_pool(
            "", factor, cost, minimum, minimum + more, target=min(ready, minimum + more), **fields
        ),
        st.sampled_from([0.2, 0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.integers(0, 2),
        st.integers(0, 6), st.integers(0, 6), cold_start_s=st.sampled_from([0.0, 20.0, 120.0]),
        queued_tokens=st.integers(0, 50_000), running=st.integers(0, 100), waiting=st.integers(0, 50),
    ),
    min_size=1, max_size=4,
).map(lambda some: [replace(pool, name=f"pool {number}") for number, pool in enumerate(some)])  # fmt: skip


@law
@given(st.sampled_from(sorted(POLICIES)), pools, st.lists(st.floats(0, 200), min_size=1, max_size=12), st.data())
def test_targets_are_within_bounds_and_the_same_for_the_same(name, some, rates, data):
    unknown = data.draw(st.sets(st.integers(0, 3)))
    some = [replace(pool, speed=None) if at in unknown else pool for at, pool in enumerate(some)]
    one, two = (Stage(create_policy(name, SLO), some) for _ in range(2))
    for rate in rates:
        held = data.draw(st.integers(0, 3))
        assert one.look(rate, held=held) == two.look(rate, held=held)  # `look` checks the bounds


@settings(derandomize=True, max_examples=12, deadline=None)
@given(st.sampled_from(["queue", "slo"]), pools, st.floats(0.0, 60.0))
def test_a_constant_demand_comes_to_rest(name, some, rate):
    some = [replace(pool, queued_tokens=0, waiting=0) for pool in some]
    stage = Stage(create_policy(name, SLO), some).run(1800, rate)
    rested = len(stage.said)
    stage.run(1800, rate)
    assert len(stage.said) == rested
    assert rested <= 8 * len(some)


@pytest.mark.slow("900 decisions of the policy, two and a half hours of looks")
def test_a_demand_that_only_varies_by_chance_moves_nothing_for_hours():
    rng = random.Random(1)
    stage = slo_stage().run(1800, 12.0)
    rested = len(stage.said)
    stage.run(7200, lambda _: sum(rng.random() < 0.06 for _ in range(1000)) / LOOK_S)
    assert len(stage.said) - rested <= 2


@law
@given(pools, st.floats(0.1, 60.0), st.floats(1.0, 3.0), st.floats(1.0, 2.0))
def test_more_demand_never_gets_cheaper_targets(some, rate, by, longer):
    some = [replace(pool, target=pool.minimum, ready=pool.minimum, queued_tokens=0) for pool in some]
    costs = []
    for stage, more, prompt in ((slo_stage(*some), 1.0, 1.0), (slo_stage(*some), by, longer)):
        stage.look(rate * more, prompt=500.0 * prompt)
        if stage.share(rate * more, only_ready=False) < 1:
            return  # all there is
        costs.append(sum(pool.cost_per_hour * pool.target for pool in stage.pools.values()))
    assert costs[0] <= costs[1] + 1e-9


def test_it_provides_for_what_comes_and_holds_on_to_it():
    stage = slo_stage().run(600, 4.0)
    assert stage.share(4.0) >= 1
    before = stage.targets
    stage.run(300, 40.0)
    assert stage.share(40.0) >= 1
    stage.run(200, 4.0)
    assert stage.share(40.0) >= 1  # 300 s have not gone by
    stage.run(1500, 4.0)
    assert stage.targets == before


def test_a_rise_is_provided_for_before_it_is_there():
    stage = slo_stage(a_pool("one", 1.0, maximum=30, cold_start_s=120.0)).run(300, 5.0)

    def rising(now):
        return 5.0 + 25.0 * (now - 300) / 900

    while stage.now < 1200:
        stage.look(rising(stage.now))
        # Until the forecast's window is full of it, and for a cold start after that, the rise is seen as a slower one.
        assert stage.share(rising(stage.now)) >= (0.9 if stage.now < 300 + 180 + 120 else 1.0)
    flat = slo_stage(a_pool("one", 1.0, maximum=30, cold_start_s=120.0)).run(1200, 30.0)
    assert stage.targets["one"] <= flat.targets["one"] * 1.3


def test_a_forecast_takes_a_trend_for_one_and_neither_a_burst_nor_a_fall():
    steady, burst, rising, falling = RateForecast(), RateForecast(), RateForecast(), RateForecast()
    for look in range(36):
        steady.saw(5.0 * look, 10.0)
        burst.saw(5.0 * look, 60.0 if 20 <= look < 23 else 10.0)
        rising.saw(5.0 * look, 10.0 + 0.5 * look)
        falling.saw(5.0 * look, 30.0 - 0.5 * look)
    assert steady.after(120) == pytest.approx(10.0)
    assert burst.after(120) == pytest.approx(10.0)
    assert rising.after(60) == pytest.approx(rising.recent + 0.1 * (15 + 60))
    assert falling.after(120) == pytest.approx(falling.recent)
    assert rising.after(1e6) == pytest.approx(2 * rising.recent)


def test_everything_goes_when_nothing_comes_and_one_comes_for_what_is_held():
    stage = slo_stage(idle_s=120.0).run(300, 4.0).run(100, 0.0)
    assert sum(stage.targets.values()) > 0
    stage.run(1200, 0.0)
    assert stage.targets == {"small": 0, "large": 0}
    assert "no request for 120 s" in stage.said[-1][1].reason
    (target,) = stage.look(0.0, held=1)
    assert (target.pool, target.replicas) == ("small", 1)
    assert "1 held" in target.reason
    stage.run(60, 0.0, held=1)
    assert stage.targets == {"small": 1, "large": 0}


def test_what_is_held_gets_the_replica_that_is_up_soonest():
    slow, quick = replace(SMALL, cold_start_s=300.0), replace(LARGE, cold_start_s=20.0)
    (target,) = slo_stage(slow, quick).look(0.0, held=3)
    assert target.pool == "large"
    (target,) = Stage(create_policy("queue", SLO), (slow, quick)).look(0.0, held=3)
    assert target.pool == "large"
    # A class that cannot hold the objectives is not the one, however soon it is up.
    useless = a_pool("useless", 0.001, 0.01, cold_start_s=1.0)
    assert {each.pool for each in slo_stage(useless, SMALL).look(1.0, held=1)} == {"small"}


GPU, P40 = a_pool("gpu", cost=0.1, maximum=1, cold_start_s=1.0), a_pool("p40", cold_start_s=20.0)


@pytest.mark.parametrize("name", ["queue", "slo"])
def test_what_is_held_gets_another_replica_if_the_first_does_not_come(name):
    stage = Stage(create_policy(name, SLO), (GPU, P40), never=("gpu",)).run(60, 0.0, held=1)
    assert stage.targets == {"gpu": 1, "p40": 0}, "the one that is up soonest"
    stage.run(60, 0.0, held=1)
    assert stage.targets == {"gpu": 1, "p40": 1}, "and the first may still come"
    assert stage.pools["p40"].ready == 1


@pytest.mark.parametrize("name", ["queue", "slo"])
def test_what_is_held_waits_for_no_pool_that_cannot_be_placed(name):
    homeless = replace(GPU, placeable=False)
    for target in (0, 1):  # as an operator may have set it
        stage = Stage(create_policy(name, SLO), (replace(homeless, target=target, starting=target, ready=0), P40))
        stage.never = ("gpu",)
        assert [(each.pool, each.replicas) for each in stage.look(0.0, held=1)] == [("p40", 1)]
        stage.run(600, 0.0, held=1)
        assert stage.targets == {"gpu": target, "p40": 1}
    stage = Stage(create_policy(name, SLO), (homeless,), never=("gpu",)).run(600, 0.0, held=1)
    assert stage.targets == {"gpu": 1}, "where there is no other it is wanted, so that its reason is told"
    stage = Stage(create_policy(name, SLO), (homeless, replace(P40, maximum=0)), never=("gpu",)).run(600, 0.0, held=1)
    assert stage.targets == {"gpu": 1, "p40": 0}, "nor where no other is allowed any"


def test_a_pool_that_cannot_be_placed_is_no_part_of_a_mix():
    homeless = replace(SMALL, placeable=False, cost_per_hour=0.01)
    stage = slo_stage(homeless, LARGE, never=("small",)).run(600, 4.0)
    assert stage.targets["small"] == 0 < stage.targets["large"]
    unknown = replace(homeless, speed=None)
    stage = slo_stage(unknown, replace(LARGE, maximum=1), never=("small",)).run(600, 1000.0)
    assert stage.targets == {"small": 0, "large": 1}


def test_replicas_that_do_not_come_are_not_counted_on():
    stage = slo_stage(SMALL, LARGE, never=("small",)).run(240, 4.0)
    assert stage.targets["large"] == 0 < stage.targets["small"]
    stage.run(400, 4.0)
    assert stage.share(4.0) >= 1
    assert stage.targets["large"] > 0
    assert stage.targets["small"] > 0  # they may still come


def test_the_costlier_class_goes_only_when_the_cheaper_one_is_ready():
    small = replace(SMALL, cold_start_s=100.0)
    stage = slo_stage(small, replace(LARGE, target=4, ready=4), settle_s=60.0)
    for _ in range(300):
        stage.look(3.0)
        assert stage.share(3.0) >= 1
    assert stage.targets["large"] == 0 < stage.targets["small"]


def test_a_class_nobody_knows_is_tried_when_the_others_do_not_suffice():
    unknown = a_pool("unknown", speed=None)
    stage = slo_stage(replace(SMALL, maximum=2), unknown).run(20, 100.0)
    assert stage.targets == {"small": 2, "unknown": 1}
    assert "speed is not known" in stage.said[-1][1].reason


@law
@given(st.floats(0.5, 40.0), st.floats(50.0, 2000.0), st.floats(0.0, 0.99), st.floats(0.0, 0.99))
def test_what_caches_hold_is_never_more_work(requests, prompt, one, other):
    some, more = (
        OfferedLoad(requests, requests * prompt, requests * 150.0, hit * requests * prompt)
        for hit in sorted((one, other))
    )
    assert carried_share(a_speed(), SLO, more) >= carried_share(a_speed(), SLO, some)


@pytest.mark.parametrize("requests", [5e-324, 1e-300, 1e-12, 1e-6])
@pytest.mark.parametrize("chunk", [32, 512])
def test_next_to_nothing_is_carried_with_room_to_spare(requests, chunk):
    """Demand dies away by halves, to numbers that nothing can be divided by. No chunk of 32 has room for 64."""
    with np.errstate(all="raise", under="ignore"):
        share = carried_share(
            replace(a_speed(), chunk=chunk), SLO, OfferedLoad(requests, 500 * requests, 100 * requests)
        )
    assert 1e3 < share < np.inf


def test_between_two_changes_to_fewer_the_cooldown_passes():
    stage = Stage(create_policy("slo", SLO, settle_s=20.0, cooldown_s=100.0), [a_pool("one", target=8)])
    stage.run(900.0, lambda now: 20.0 * 0.97 ** (now / LOOK_S))
    at = [now for now, _ in stage.said]
    assert at[:3] == [100.0, 200.0, 300.0], "as soon as it has passed, while less and less is asked for"


def test_what_caches_held_once_is_not_counted_on_when_replicas_are_to_go():
    def looked(hits, looks):
        stage = Stage(create_policy("slo", SLO, settle_s=100.0, cooldown_s=0.0), [a_pool("one", target=8)])
        for turn in range(looks):
            stage.look(12.0, 2000.0, cached_tokens_per_s=(0.0, hits)[turn > 0] * 12.0 * 2000.0)
        return stage.pools["one"].target

    assert looked(0.9, 10) == looked(0.0, 40) == 8, "what is there was needed within the last 100 s"
    assert looked(0.9, 40) < 8


def test_a_queue_policy_keeps_what_runs_and_waits_near_its_target():
    pool = a_pool("one", maximum=10, target=2)
    stage = Stage(create_policy("queue", SLO, running=10, queued_tokens=1000), [replace(pool, running=22)])
    assert stage.look(5.0) == ()  # 11 each
    stage.pools["one"] = replace(pool, running=30, waiting=12)
    (target,) = stage.look(5.0)
    assert target.replicas == 5
    assert "42 sequences" in target.reason
    stage.pools["one"] = replace(pool, queued_tokens=7500)
    assert stage.look(5.0)[0].replicas == 8


def test_a_fixed_fleet_is_what_it_was_set_to():
    stage = Stage(create_policy("fixed", SLO, replicas={"small": 3, "large": 99}), (SMALL, LARGE))
    stage.run(20, 1000.0, held=5)
    assert stage.targets == {"small": 3, "large": 8}
    assert len(stage.said) == 2


@pytest.mark.parametrize(
    ("name", "given", "field"),
    [
        ("best", {}, "policy"), ("slo", {"haste": 1}, "haste"), ("slo", {"headroom": -0.1}, "headroom"),
        ("slo", {"idle_s": float("nan")}, "idle_s"), ("queue", {"running": 0}, "running"),
        ("slo", {"settle_s": "soon"}, "settle_s"), ("fixed", {"replicas": {"a": -1}}, "replicas"),
        ("fixed", {"replicas": 3}, "replicas"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(name, given, field):
    with pytest.raises(InvalidRequest) as error:
        create_policy(name, SLO, **given)
    assert error.value.param == field
