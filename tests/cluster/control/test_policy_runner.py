"""Policies of a live fleet: asked now and then, told of all that has come since, and kept within bounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fake_fleet import Bench

from motley.cluster.fleet.control.backend.fleet_backend import PlannedFleet
from motley.cluster.fleet.control.reconciler.policy_runner import PolicyRunner
from motley.cluster.fleet.control.state.control_state import PolicyPlan, PoolPlan
from motley.cluster.fleet.scaling.scaling_policy import FleetObservation, ReplicaTarget


def taken(monkeypatch: pytest.MonkeyPatch, name: str, policy: object) -> None:
    """For the policy of that name."""
    for module in ("fleet_reconciler", "policy_runner"):
        monkeypatch.setattr(
            f"motley.cluster.fleet.control.reconciler.{module}.make_policy",
            lambda plan: policy if plan.name == name else None,
        )


class OneMore:
    """A policy that wants one more each time, beyond all bounds."""

    def __init__(self) -> None:
        self.seen: list[FleetObservation] = []

    def decide(self, observed: FleetObservation) -> tuple[ReplicaTarget, ...]:
        self.seen.append(observed)
        return tuple(ReplicaTarget(pool.name, pool.target + 1, f"{pool.ready} serve") for pool in observed.pools)


async def test_a_policy_is_asked_now_and_then_and_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = OneMore()
    taken(monkeypatch, "more", policy)
    bench = Bench(1, maximum=3)
    await bench.steps()
    await bench.plane.set_policy(PolicyPlan("more"), [], by="test", reason="why")
    await bench.steps(50)
    assert bench.plane.state.pools["cpu"].target == 3
    assert 4 <= len(policy.seen) <= 6, "every ASK_S"
    told = [event for event in bench.plane.state.events if event.kind == "scaled"]
    assert [(one.by, one.after, one.reason) for one in told] == [
        ("policy more", 2, "1 serve"), ("policy more", 3, "2 serve")
    ]  # fmt: skip
    assert policy.seen[0].pools[0].speed is not None


async def test_a_policy_is_told_which_pools_cannot_be_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = OneMore()
    taken(monkeypatch, "more", policy)
    bench = Bench(1)
    await bench.steps()
    await bench.plane.set_policy(PolicyPlan("more"), [], by="test", reason="why")
    await bench.steps(20)
    assert [one.placeable for one in policy.seen[-1].pools] == [True]
    bench.fleet.pools["cpu"] = replace(bench.fleet.pools["cpu"], placeable=False)
    await bench.steps(20)
    assert [one.placeable for one in policy.seen[-1].pools] == [False]


async def test_a_pool_that_is_gone_is_as_fast_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = OneMore()
    taken(monkeypatch, "more", policy)
    bench = Bench(1)
    await bench.steps()
    await bench.scale(0)
    await bench.steps()
    await bench.plane.set_policy(PolicyPlan("more"), [], by="test", reason="why")
    await bench.steps(10)
    [seen] = policy.seen[0].pools
    assert (seen.ready, seen.speed is not None) == (0, True)


class Counting:
    """A policy that wants nothing, and knows what came."""

    def __init__(self) -> None:
        self.seen: list[FleetObservation] = []

    def decide(self, observed: FleetObservation) -> tuple[ReplicaTarget, ...]:
        self.seen.append(observed)
        return ()


def comes(bench: Bench, requests: int) -> None:
    """So many, of 100 and 10 tokens each, since the last look."""
    demand = bench.fleet.demand
    bench.fleet.demand = replace(
        demand,
        requests=demand.requests + requests,
        prompt_tokens=demand.prompt_tokens + 100 * requests,
        output_tokens=demand.output_tokens + 10 * requests,
    )


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    policy = Counting()
    taken(monkeypatch, "counting", policy)
    return policy


async def policed() -> Bench:
    bench = Bench(1)
    await bench.plane.set_policy(PolicyPlan("counting"), [], by="test", reason="why")
    await bench.steps(1)  # from here on it is counted
    return bench


async def test_every_request_is_seen_and_none_twice(counting: Counting) -> None:
    bench, rng = await policed(), random.Random(3)
    came = 0
    for _ in range(1000):
        now = sum(rng.random() < 0.01 for _ in range(100))  # 2/s
        comes(bench, now)
        came += now
        await bench.steps(1)
    seen = [(one.requests_per_s, one.prompt_tokens_per_s, one.output_tokens_per_s) for one in counting.seen]
    assert len(seen) == 100
    for number, tokens in enumerate((1, 100, 10)):
        assert sum(5.0 * each[number] for each in seen) == pytest.approx(came * tokens)


async def test_a_request_every_five_seconds_is_no_idleness() -> None:
    bench = Bench(1)
    await bench.plane.set_policy(PolicyPlan("slo", 3.0, 0.5, {"idle_s": 60.0}), [], by="test", reason="why")
    for look in range(400):
        comes(bench, look % 10 == 5)
        await bench.steps(1)
    assert bench.plane.state.pools["cpu"].target == 1
    await bench.steps(200)
    assert bench.plane.state.pools["cpu"].target == 0
    assert bench.plane.state.events[-1].kind == "settled"
    assert "no request for 60 s" in [event.reason for event in bench.plane.state.events]


async def test_while_no_ingress_tells_nobody_is_asked_and_what_came_is_told_after_it(counting: Counting) -> None:
    bench = await policed()
    bench.fleet.telling = False
    comes(bench, 60)
    await bench.steps(40)
    assert not counting.seen, "silence is no idleness"
    bench.fleet.telling = True
    await bench.steps(1)
    [seen] = counting.seen
    assert seen.requests_per_s == pytest.approx(60 / 20.5)


async def test_a_policy_that_is_new_sees_the_last_seconds_alone(counting: Counting) -> None:
    bench = Bench(1)
    comes(bench, 1000)
    await bench.steps(100)
    await bench.plane.set_policy(PolicyPlan("counting"), [], by="test", reason="why")
    await bench.steps(10)
    assert [one.requests_per_s for one in counting.seen] == [0.0]


class Faulty:
    """A policy that fails, and knows what it wants after that."""

    def __init__(self) -> None:
        self.failing = True
        self.wanted: tuple[ReplicaTarget, ...] = ()

    def decide(self, observed: FleetObservation) -> tuple[ReplicaTarget, ...]:
        if self.failing:
            raise ZeroDivisionError("no\nspeed")
        return self.wanted


async def test_a_policy_that_fails_is_told_and_the_fleet_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Faulty()
    taken(monkeypatch, "faulty", policy)
    bench = Bench(1)
    await bench.plane.set_policy(PolicyPlan("faulty"), [], by="test", reason="why")
    await bench.steps(40)
    assert bench.plane.observed_s == bench.clock.now - 0.5, "what is seen is of now"
    assert bench.plane.policy_failed == "ZeroDivisionError: no speed"
    await bench.scale(2, reason="by hand")
    await bench.steps()
    assert len(bench.fleet.replicas("cpu")) == 2, "operators decide all the same"
    bench.again()
    await bench.steps(40)
    assert bench.kinds.count("policy_failed") == 1, "told once, by whichever process"
    [told] = [event for event in bench.plane.state.events if event.kind == "policy_failed"]
    assert (told.by, told.reason) == ("policy faulty", "ZeroDivisionError: no speed")
    policy.failing, policy.wanted = False, (ReplicaTarget("cpu", 3, "more"),)
    await bench.steps(20)
    assert bench.plane.policy_failed == ""
    assert bench.plane.state.pools["cpu"].target == 3
    policy.failing = True
    await bench.steps(20)
    assert bench.kinds.count("policy_failed") == 2, "again, after it has decided something"


async def test_what_a_policy_may_not_want_of_one_pool_the_others_do_not_feel(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Faulty()
    policy.failing, policy.wanted = False, (ReplicaTarget("gone", 2, "why"), ReplicaTarget("cpu", 3, "more"))
    taken(monkeypatch, "faulty", policy)
    bench = Bench(1)
    await bench.plane.set_policy(PolicyPlan("faulty"), [], by="test", reason="why")
    await bench.steps(20)
    assert bench.plane.state.pools["cpu"].target == 3
    assert bench.plane.policy_failed == "gone: pool: there is no 'gone'; there are: cpu"
    assert bench.kinds.count("policy_failed") == 1


async def test_a_plan_of_which_no_policy_can_be_made_leaves_the_fleet_as_it_is() -> None:
    bench = Bench(2)
    bench.fleet.plan = PlannedFleet("a", {"cpu": PoolPlan(2, 0, 8)}, PolicyPlan("slo", ttft_s=1e6))
    await bench.steps(20)
    assert bench.plane.observed_s == bench.clock.now - 0.5
    assert "ttft_s: 1e+06 is not accepted" in bench.plane.policy_failed
    assert len(bench.fleet.replicas("cpu")) == 2
    await bench.plane.set_policy(PolicyPlan("slo"), [], by="test", reason="why")
    await bench.steps(1)
    assert bench.plane.policy_failed == ""


class Scaled(Bench):
    """Three replicas under `queue` with next to nothing to do: one would suffice."""

    def __init__(self) -> None:
        super().__init__(3)

    async def under(self, **settings: float) -> Scaled:
        plan = PolicyPlan("queue", settings={"settle_s": 60.0, **settings})
        await self.plane.set_policy(plan, [], by="test", reason="why")
        return self

    async def seconds(self, seconds: float) -> int:
        """How many are wanted after so long, in which a request came every second."""
        for _ in range(int(seconds)):
            comes(self, 1)
            await self.steps(2)
        return self.plane.state.pools["cpu"].target


async def test_replicas_of_the_start_stay_until_it_has_been_seen_that_fewer_suffice() -> None:
    bench = await Scaled().under()
    assert await bench.seconds(58) == 3
    assert await bench.seconds(14) == 1
    [told] = [one for one in bench.plane.state.events if one.kind == "scaled"]
    assert told.reason == "no more than 1 wanted for 60 s"


async def test_a_plane_that_begins_again_or_has_another_policy_observes_anew() -> None:
    bench = await Scaled().under()
    assert await bench.seconds(50) == 3
    bench.again()
    assert await bench.seconds(58) == 3
    await bench.under(settle_s=61.0)
    assert await bench.seconds(58) == 3
    assert await bench.seconds(14) == 1


async def test_what_an_operator_wants_is_not_undone_by_what_was_seen_before() -> None:
    bench = await Scaled().under()
    assert await bench.seconds(90) == 1
    await bench.scale(4)
    assert await bench.seconds(58) == 4
    assert await bench.seconds(14) == 1


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
async def test_a_clock_that_is_set_scales_nothing(seconds: float) -> None:
    bench = await Scaled().under(idle_s=60.0)
    for target in (3, 3):
        bench.clock.set(seconds)
        assert await bench.seconds(20) == target
    assert bench.plane.rates.requests == pytest.approx(1.0, rel=1.1), "counted over seconds that passed"
    assert bench.plane.state.events[-1].kind != "scaled"


async def test_silence_of_the_ingresses_is_not_counted_as_observed() -> None:
    bench = await Scaled().under(idle_s=60.0)
    assert await bench.seconds(30) == 3
    bench.fleet.telling = False
    await bench.steps(400)
    bench.fleet.telling = True
    await bench.steps(14)
    assert bench.plane.state.pools["cpu"].target == 3


async def test_nobody_is_asked_in_a_look_that_no_ingress_answers(counting: Counting) -> None:
    """A look before has failed in the middle: it was told what came by then, but now nobody says what runs."""
    bench, asking = Bench(1), PolicyRunner()
    status, look = await bench.fleet.status(), await bench.fleet.snapshots()
    assert status is not None
    state = replace(bench.plane.state, policy=PolicyPlan("counting"))
    for now in (0.0, 10.0):
        asking.saw(now, status)
    asking.decide(10.0, state, look, None, {})
    assert not counting.seen
    asking.decide(10.0, state, look, status, {})
    assert len(counting.seen) == 1
