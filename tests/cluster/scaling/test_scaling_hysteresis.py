"""Fewer replicas only after it has really been observed, for all of the time that the reason tells, that fewer do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.cluster.fleet.scaling.policy_registry import create_policy
from motley.cluster.fleet.scaling.rate_forecast import RateForecast
from motley.cluster.fleet.scaling.scaling_hysteresis import (
    MAX_STEP_S,
    ExternalScalingDetector,
    IdleTimer,
    ObservedTime,
    SlidingMaximum,
)
from motley.cluster.fleet.scaling.scaling_policy import FleetObservation, PoolObservation, ReplicaTarget
from motley.cluster.routing.prediction.latency_model import PROFILED_BATCH_SIZES, ReplicaSpeed, Slo

SLO = Slo(3.0, 0.1)
SETTLE_S, IDLE_S = 120.0, 200.0
SPEED = ReplicaSpeed(
    prefill_tokens_per_s=4000.0, decode_s=tuple(0.010 + 0.0003 * batch for batch in PROFILED_BATCH_SIZES),
    context_s=1e-8, chunk=512, max_running=64, kv_tokens=200_000,
)  # fmt: skip
law = settings(derandomize=True, max_examples=80, deadline=None)
POLICIES = {
    "queue": {"running": 1.0, "tolerance": 0.0, "settle_s": SETTLE_S, "idle_s": IDLE_S},
    "slo": {"settle_s": SETTLE_S, "idle_s": IDLE_S, "cooldown_s": 0.0},
}


@dataclass
class Stage:
    """One pool under a policy, and a clock that is set by hand. `observed_s`: of it, what was seen without a gap."""

    name: str
    target: int = 3
    minimum: int = 0
    now: float = 1e9
    observed_s: float = 0.0
    said: list[tuple[float, ReplicaTarget]] = field(default_factory=list)
    started: bool = False

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another process of the control plane, or another policy."""
        self.policy = create_policy(self.name, SLO, **POLICIES[self.name])
        self.started = False

    def look(self, step_s: float = 5.0, *, busy: int = 1) -> ReplicaTarget | None:
        """After `step_s`: what was decided."""
        self.now += step_s
        self.observed_s += min(max(step_s, 0.0), MAX_STEP_S) if self.started else 0.0
        self.started = True
        pool = PoolObservation(
            "one", self.minimum, 20, self.target, self.target, 0, SPEED, 1.0, 5.0, running=busy, waiting=0
        )  # fmt: skip
        told = self.policy.decide(FleetObservation(self.now, (pool,), 0.2 * busy, 20.0 * busy, 10.0 * busy))
        for one in told:
            self.said.append((self.observed_s, one))
            self.target = one.replicas
        return told[0] if told else None

    def looks(self, seconds: float, step_s: float = 5.0, *, busy: int = 1) -> ReplicaTarget | None:
        """Until something is decided, or the time is over."""
        until = self.now + seconds
        while self.now < until:
            if decided := self.look(step_s, busy=busy):
                return decided
        return None


@pytest.fixture(params=sorted(POLICIES))
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(request.param)


def test_one_observation_is_not_one_of_two_minutes(stage: Stage) -> None:
    assert stage.looks(SETTLE_S) is None, "as many as there were at the start, until it has been observed"
    told = stage.looks(60)
    assert told is not None
    assert told.replicas == 1
    assert "for 120 s" in told.reason
    assert stage.observed_s >= SETTLE_S


def test_another_policy_and_another_process_begin_anew(stage: Stage) -> None:
    assert stage.looks(SETTLE_S - 20) is None
    stage.restart()
    assert stage.looks(SETTLE_S) is None
    assert stage.looks(20) is not None


def test_what_an_operator_has_scaled_stays_until_it_has_been_observed_as_long(stage: Stage) -> None:
    assert stage.looks(SETTLE_S + 20) is not None
    assert stage.looks(SETTLE_S) is None, "one suffices, and has for long"
    stage.target = 4
    assert stage.looks(SETTLE_S) is None
    told = stage.looks(20)
    assert told is not None
    assert told.replicas == 1


def test_what_an_operator_has_started_is_idle_from_then_on(stage: Stage) -> None:
    for _ in range(100):
        stage.look(busy=0)
    assert stage.target == 0
    stage.target, since = 2, stage.observed_s  # warmed up by hand, long after the last request
    assert stage.looks(SETTLE_S, busy=0) is None
    while stage.target:
        stage.look(busy=0)
    assert stage.observed_s - since >= IDLE_S
    assert stage.said[-1][1].reason == "no request for 200 s"


@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("gap_s", [1e3, 3600.0, -3600.0, 1e9])
def test_time_that_nobody_has_observed_does_not_count(stage: Stage, gap_s: float, busy: int) -> None:
    """A control plane that sees nothing for an hour, and a clock that is set."""
    stage.looks(50, busy=busy)
    assert stage.look(gap_s, busy=busy) is None
    assert stage.looks(SETTLE_S - 50 - MAX_STEP_S, busy=busy) is None
    assert stage.looks(IDLE_S, busy=busy) is not None


def test_bounds_that_allow_fewer_are_taken_up_at_once_where_it_has_been_observed(stage: Stage) -> None:
    stage.minimum = 3
    assert stage.looks(SETTLE_S + 20) is None
    stage.minimum = 1
    assert stage.look() is not None


def test_a_pool_that_comes_again_is_new() -> None:
    policy = create_policy("queue", SLO, **POLICIES["queue"])
    pool = PoolObservation("one", 0, 20, 3, 3, 0, SPEED, 1.0, 5.0, running=1)
    other = replace(pool, name="other", minimum=3)
    for look in range(100):
        there = (other, pool) if look < 10 or look > 80 else (other,)
        assert policy.decide(FleetObservation(5.0 * look, there, 1.0, 100.0, 10.0)) == ()


steps = st.one_of(st.floats(0.5, 10.0), st.floats(-50.0, 4000.0))
events = st.one_of(
    st.tuples(st.just("look"), steps), st.tuples(st.sampled_from(["restart", "scale"]), st.integers(1, 9))
)


@pytest.mark.slow("80 drawn histories of up to 120 events, decided one by one")
@law
@given(st.sampled_from(sorted(POLICIES)), st.lists(events, min_size=30, max_size=120), st.data())
def test_whatever_comes_fewer_are_wanted_only_of_what_was_observed(
    name: str, happened: Iterable[tuple[str, float]], data: st.DataObject
) -> None:
    stage = Stage(name, minimum=1)
    since = stage.observed_s
    seen: list[tuple[float, int]] = []
    for kind, value in happened:
        if kind == "look":
            before, busy = stage.target, data.draw(st.integers(0, 6))
            told = stage.look(value, busy=busy)
            seen.append((stage.observed_s, busy))
            if told is None or told.replicas > before:
                continue
            spanned = IDLE_S if told.reason.startswith("no request") else SETTLE_S
            assert stage.observed_s - since >= spanned
            within = [busy for at, busy in seen if at > stage.observed_s - spanned]
            assert max(within) <= (0 if spanned == IDLE_S else told.replicas if name == "queue" else 6)
            continue
        if kind == "restart":
            stage.restart()
        elif int(value) == stage.target:
            continue
        else:
            stage.target = int(value)
        since = stage.observed_s  # nothing that was observed before counts any more
        seen.clear()


@law
@given(st.lists(st.tuples(steps, st.floats(0, 10)), min_size=1, max_size=60), st.floats(1, 100))
def test_the_highest_is_that_of_the_time_that_is_told(looks: Iterable[tuple[float, float]], span_s: float) -> None:
    time, latest = ObservedTime(), SlidingMaximum(span_s)
    clock, seen = 0.0, []
    for step_s, value in looks:
        clock += step_s
        now = time.saw(clock)
        seen.append((now, value))
        assert latest.saw(now, value) == max(value for at, value in seen if at > now - span_s)
        assert latest.settled == (now - seen[0][0] >= span_s)


def test_nothing_is_settled_before_it_has_been_seen() -> None:
    latest = SlidingMaximum(0.0)
    assert not latest.settled
    assert latest.saw(5.0, 3.0) == 3.0
    assert latest.saw(6.0, 1.0) == 1.0
    assert latest.settled, "of no time"
    latest.reset()
    assert not latest.settled


def test_targets_that_a_policy_has_left_are_no_changes_of_others() -> None:
    left = ExternalScalingDetector()
    pools = [PoolObservation(name, 0, 9, 2, 2, 0, None, 1.0, 5.0) for name in ("a", "b")]
    assert left.changed_by_others(pools) == {"a", "b"}
    left.record_targets(pools, [ReplicaTarget("a", 3, "more")])
    assert left.changed_by_others([replace(pools[0], target=3), pools[1]]) == set()
    assert left.changed_by_others([replace(pools[0], target=1), pools[1]]) == {"a"}
    left.record_targets(pools[1:], [])
    assert left.changed_by_others(pools) == {"a"}


def test_idleness_is_counted_from_the_first_look() -> None:
    idle, empty = IdleTimer(), FleetObservation(50.0, (), 0.0, 0.0, 0.0)
    assert idle.saw(empty) == 0.0
    assert idle.saw(replace(empty, now=60.0)) == 10.0
    idle.reset()
    assert idle.saw(replace(empty, now=70.0)) == 0.0


def test_a_forecast_that_is_told_twice_of_one_moment_takes_the_later() -> None:
    forecast = RateForecast()
    for at, rate in ((0.0, 1.0), (0.0, 5.0), (5.0, 7.0), (5.0, 9.0), (10.0, 11.0), (15.0, 13.0), (20.0, 15.0)):
        forecast.saw(at, rate)
        assert forecast.after(60.0) >= forecast.recent
    assert forecast.recent == pytest.approx((5 + 9 + 11 + 13 + 15) / 5)
