"""The plane's steps, on a fleet in memory: drained before it goes, resumed where it was ended, told with its reason."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fake_fleet import PROFILE, Bench

from motley.cluster.fleet.control.backend.fleet_backend import PlannedFleet, PoolSnapshot
from motley.cluster.fleet.control.state.control_state import PolicyPlan, PoolPlan
from motley.cluster.routing.fleet_status import DemandCounters, FleetStatus, FleetStatusMerger, ReplicaStatus
from motley.replicas.errors import NotFound, Unavailable
from motley.replicas.types import ReplicaLoad


async def test_up_and_down_and_to_nothing_and_back() -> None:
    bench = Bench(1)
    for wanted in (3, 1, 0, 1):
        await bench.scale(wanted, reason=f"to {wanted}")
        await bench.steps()
        assert len(bench.fleet.replicas("cpu")) == wanted
        assert bench.fleet.pools["cpu"].target == wanted
    told = [event for event in bench.plane.state.events if event.kind == "scaled"]
    assert [(one.before, one.after, one.reason) for one in told] == [
        (1, 3, "to 3"), (3, 1, "to 1"), (1, 0, "to 0"), (0, 1, "to 1")
    ]  # fmt: skip
    assert bench.plane.state.generation == 4


async def test_what_works_goes_last_and_when_it_is_done() -> None:
    bench = Bench(3)
    await bench.steps()
    first, second, third = bench.fleet.replicas("cpu")
    bench.fleet.work = {first: 2, third: 1}
    await bench.scale(1)
    await bench.steps()
    assert bench.fleet.marked == {second, third}
    assert set(bench.fleet.replicas("cpu")) == {first, third}, "one that works is not ended"
    assert bench.fleet.pools["cpu"].target == 2, "nor does Serve choose another"
    bench.fleet.work = {first: 2}
    await bench.steps()
    assert bench.fleet.replicas("cpu") == [first]


async def test_a_drain_has_an_end() -> None:
    bench = Bench(2)
    await bench.steps()
    first, second = bench.fleet.replicas("cpu")
    bench.fleet.work = {first: 1}
    await bench.plane.drain(first, remove=False, by="test", reason="why", timeout_s=10.0)
    await bench.steps(10)
    assert first in bench.fleet.replicas("cpu")
    await bench.steps(16)
    assert first not in bench.fleet.replicas("cpu")
    assert len(bench.fleet.replicas("cpu")) == 2, "another is in its place"
    assert second in bench.fleet.replicas("cpu")
    assert bench.kinds.count("drained") == 1


async def test_a_load_that_was_told_before_the_mark_does_not_end_a_replica() -> None:
    bench = Bench(2)
    await bench.steps()
    first, _ = bench.fleet.replicas("cpu")
    bench.fleet.age_s = 1000.0
    await bench.plane.drain(first, remove=True, by="test", reason="why")
    await bench.steps()
    assert first in bench.fleet.marked
    assert first in bench.fleet.replicas("cpu")
    bench.fleet.age_s = 0.0
    await bench.steps()
    assert first not in bench.fleet.replicas("cpu")


async def test_the_one_that_is_removed_is_the_one_that_was_named() -> None:
    bench = Bench(4)
    await bench.steps()
    names = bench.fleet.replicas("cpu")
    await bench.plane.drain(names[1], remove=True, by="test", reason="why")
    await bench.steps()
    assert bench.fleet.replicas("cpu") == [names[0], names[2], names[3]]
    with pytest.raises(NotFound, match="that serves"):
        await bench.plane.drain(names[1], remove=True, by="test", reason="why")


async def test_one_that_drains_is_removed_or_given_less_time_later() -> None:
    bench = Bench(3)
    await bench.steps()
    first, second, third = bench.fleet.replicas("cpu")
    bench.fleet.work = {first: 1, second: 1}
    for name in (first, second):
        await bench.plane.drain(name, remove=False, by="test", reason="its fan")
    await bench.steps()
    await bench.plane.drain(first, remove=True, by="test", reason="its fan for good", timeout_s=1.0)
    await bench.steps()
    assert bench.fleet.replicas("cpu") == [second, third]
    assert bench.fleet.pools["cpu"].target == bench.plane.state.pools["cpu"].target == 2
    bench.fleet.work = {}
    await bench.steps()
    assert len(bench.fleet.replicas("cpu")) == 2
    assert second not in bench.fleet.replicas("cpu"), "it is replaced"


async def test_more_are_wanted_before_those_have_gone() -> None:
    bench = Bench(2)
    await bench.steps()
    first, second = bench.fleet.replicas("cpu")
    bench.fleet.work = {first: 1, second: 1}
    await bench.scale(1)
    await bench.steps(3)
    await bench.scale(2)
    bench.fleet.work = {}
    await bench.steps()
    assert len(bench.fleet.replicas("cpu")) == 2
    assert bench.fleet.pools["cpu"].target == 2
    assert not bench.plane.state.drains


async def test_without_an_ingress_serve_takes_away_what_it_likes() -> None:
    bench = Bench(3)
    await bench.steps()
    bench.fleet.telling = False
    await bench.scale(1)
    await bench.steps()
    assert len(bench.fleet.replicas("cpu")) == 1
    assert not bench.plane.state.drains


async def test_a_mark_that_was_forgotten_is_made_again() -> None:
    bench = Bench(2)
    await bench.steps()
    first, _ = bench.fleet.replicas("cpu")
    bench.fleet.work = {first: 1}
    await bench.plane.drain(first, remove=False, by="test", reason="why")
    await bench.steps(2)
    bench.fleet.marked.clear()  # another ingress
    await bench.steps(2)
    assert bench.fleet.marked == {first}


@pytest.mark.parametrize("seed", range(20))
async def test_ended_at_any_moment_it_goes_on_and_nothing_is_done_twice(seed: int) -> None:
    """Between any two calls of its own: scaled 1 to 3 to 1, drained and rolled, each decision counts once."""
    rng = random.Random(seed)
    bench = Bench(1)
    await bench.steps()

    async def troubled(number: int) -> None:
        for _ in range(number):
            bench.fleet.turn()
            bench.clock.now += 0.5
            at = len(bench.fleet.calls) + rng.randrange(3)
            kept, bench.store.full = bench.store.times, rng.random() < 0.2
            try:
                await bench.plane.step()
            except Unavailable:
                assert bench.store.times == kept
            bench.store.full = False
            if rng.random() < 0.5 or len(bench.fleet.calls) > at:
                bench.again()

    await bench.scale(3)
    await troubled(12)
    await bench.plane.roll("cpu", "", "v1", by="test", reason="why")
    await troubled(25)
    await bench.scale(1)
    await troubled(25)
    await bench.steps(8)
    assert len(bench.fleet.replicas("cpu")) == 1
    assert bench.plane.state.generation == 3
    assert {kind: bench.kinds.count(kind) for kind in ("scaled", "rolling", "rolled")} == {
        "scaled": 2, "rolling": 1, "rolled": 1
    }  # fmt: skip
    assert bench.fleet.pools["cpu"].version == "v1"
    assert not bench.plane.state.drains


async def test_what_cannot_be_kept_is_not_decided() -> None:
    bench = Bench(1)
    await bench.steps()
    bench.store.full = True
    with pytest.raises(Unavailable):
        await bench.scale(3)
    bench.store.full = False
    await bench.steps()
    assert bench.fleet.replicas("cpu") == ["r1"]
    assert bench.plane.state.generation == 0


async def test_why_there_are_fewer_is_told_once() -> None:
    bench = Bench(1, room=2)
    await bench.steps()
    await bench.scale(3)
    await bench.steps()
    bench.again()
    await bench.steps()
    assert bench.plane.pending == {"cpu": "no GPU free"}
    assert bench.kinds == ["settled", "scaled", "pending"]
    bench.fleet.room = 3
    await bench.steps()
    assert bench.plane.pending == {}
    assert bench.kinds == ["settled", "scaled", "pending", "settled"]


async def test_nobody_else_writes_targets() -> None:
    bench = Bench(2)
    await bench.steps()
    await bench.fleet.set_target("cpu", 5)
    await bench.steps()
    assert bench.fleet.pools["cpu"].target == 2
    assert len(bench.fleet.replicas("cpu")) == 2


async def test_a_roll_replaces_all_with_the_targets_of_now() -> None:
    bench = Bench(1)
    await bench.scale(3)
    await bench.steps()
    before = set(bench.fleet.replicas("cpu"))
    await bench.plane.roll("cpu", "other", "v1", by="test", reason="why")
    await bench.steps(16)
    assert len(bench.fleet.replicas("cpu")) == 3
    assert not before & set(bench.fleet.replicas("cpu"))
    assert [call for call in bench.fleet.calls if call[0] == "redeploy"] == [
        ("redeploy", {"cpu": 3}, {"cpu": "v1"}, {"cpu": "other"})
    ]
    assert bench.plane.state.pools["cpu"].model == "other"


async def test_a_bad_roll_is_taken_back() -> None:
    bench = Bench(2)
    await bench.steps()
    before = bench.fleet.replicas("cpu")
    bench.fleet.bad_versions = {"v1"}
    await bench.plane.roll("cpu", "other", "v1", by="test", reason="why")
    await bench.steps(16)
    assert bench.fleet.replicas("cpu") == before
    assert bench.fleet.pools["cpu"].version == "v0"
    assert [call[2:] for call in bench.fleet.calls if call[0] == "redeploy"] == [
        ({"cpu": "v1"}, {"cpu": "other"}), ({"cpu": "v0"}, {})
    ]  # fmt: skip
    assert bench.kinds[-1] == "roll_failed"
    assert bench.plane.state.events[-1].reason == "it is bad"
    assert bench.plane.state.pools["cpu"].model == ""


async def test_what_is_deployed_later_is_taken_over_once() -> None:
    bench = Bench(2)
    await bench.scale(3)
    bench.fleet.plan = PlannedFleet("a", {"cpu": PoolPlan(1, 1, 2), "more": PoolPlan(2, 0, 4)}, PolicyPlan())
    bench.fleet.pools["more"] = PoolSnapshot(2, version="v0")
    await bench.steps()
    assert (len(bench.fleet.replicas("cpu")), len(bench.fleet.replicas("more"))) == (2, 2), "a target stays, in bounds"
    await bench.plane.set_policy(None, [("cpu", 0, 8)], by="test", reason="why")
    bench.again()
    await bench.steps()
    assert bench.plane.state.pools["cpu"].maximum == 8, "the same deployment says nothing new"
    assert bench.kinds.count("deployed") == 1
    bench.fleet.plan = PlannedFleet("b", {"more": PoolPlan(1, 0, 4)}, PolicyPlan())
    await bench.steps()
    assert list(bench.plane.state.pools) == ["more"]
    assert len(bench.fleet.replicas("more")) == 2


def status(ingress: str, demand: DemandCounters, *replicas: ReplicaStatus) -> FleetStatus:
    return FleetStatus(replicas, demand, ingress)


def test_what_several_ingresses_know_is_one() -> None:
    """Counts never fall, whichever ingress ends; of a replica it is the freshest that counts, and the worst of it."""
    gathered = FleetStatusMerger()
    old, new = (ReplicaStatus("p", "r", "ready", PROFILE, ReplicaLoad(running=number), age_s)
                for number, age_s in ((1, 0.4), (2, 0.1)))  # fmt: skip
    both = gathered.together(
        [
            status("a", DemandCounters(5, held=1), replace(old, state="draining")),
            status("b", DemandCounters(7, held=2), new),
        ]
    )
    assert both is not None
    assert both.demand == DemandCounters(12, held=3)
    assert [(one.state, one.load.running) for one in both.replicas] == [("draining", 2)]
    left = gathered.together([status("b", DemandCounters(8), new)])
    assert left is not None
    assert left.demand == DemandCounters(13)
    assert gathered.together([]) is None


async def test_the_ingresses_are_told_why_replicas_that_are_wanted_do_not_start() -> None:
    bench = Bench(1)
    await bench.steps()
    assert bench.fleet.failing == ""
    bench.fleet.pools["cpu"] = replace(bench.fleet.pools["cpu"], replicas=(), failing="no such file")
    await bench.plane.step()
    assert bench.fleet.failing == "cpu: no such file"
    bench.fleet.pools["cpu"] = replace(bench.fleet.pools["cpu"], failing="")
    await bench.plane.step()
    assert bench.fleet.failing == "", "it may yet come"
    await bench.scale(0)
    bench.fleet.pools["cpu"] = replace(bench.fleet.pools["cpu"], target=0, failing="of what was tried before")
    await bench.plane.step()
    assert bench.fleet.failing == "", "none is wanted"
