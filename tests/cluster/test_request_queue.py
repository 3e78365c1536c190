"""The waiting line itself, over replicas that have room when the test says so."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from motley.cluster.routing.directory.replica_directory import ReplicaDirectory
from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.routing.queueing.fair_queue import FairQueue
from motley.cluster.routing.queueing.request_queue import MAX_PASSED_SHARE, SCAN_INTERVAL_S, RequestQueue, RoutingConfig
from motley.replicas.errors import Overloaded, Unavailable
from motley.replicas.types import (
    PROFILED_BATCH_SIZES,
    ModelInfo,
    ReplicaLoad,
    ReplicaProfile,
    Request,
    SamplingParams,
)


class Fleet:
    """The part of `ReplicaDirectory` that the queue uses."""

    def __init__(self) -> None:
        self.replicas: dict[str, Any] = {"only": None}
        self.had_replica = True
        self.changed = asyncio.Event()
        self.room = False

    def fits(self, request: Request) -> bool:
        return True

    def has_capacity(self, request: Request, *, allow_late: bool, waited_s: float) -> bool:
        return self.room

    def is_starved_by_others(self, request: Request) -> bool:
        return False

    def hear(self, *, room: bool) -> None:
        self.room = room
        self.changed.set()


def request(name: str = "r", tokens: int = 3, tenant: str = "") -> Request:
    return Request(name, tuple(range(tokens)), SamplingParams(max_tokens=4, seed=0), tenant=tenant)


def a_line(fleet: Any, **routing: Any) -> RequestQueue:
    return RequestQueue(fleet, RoutingConfig(**{"max_wait_s": 60.0, **routing}), lambda: True)


def ask(line: RequestQueue, asked: Request, deadline_s: float = 1e6) -> asyncio.Task[None]:
    now = asyncio.get_running_loop().time()
    return asyncio.create_task(line.wait_turn(asked, now, now + deadline_s))


async def held(line: RequestQueue, count: int) -> None:
    async with asyncio.timeout(10):
        while line.held != count:
            await asyncio.sleep(0.001)


async def test_one_that_leaves_as_its_turn_comes_takes_nobody_with_it() -> None:
    fleet = Fleet()
    line = a_line(fleet)
    asked = [ask(line, request(str(number))) for number in range(3)]
    await held(line, 3)
    fleet.hear(room=True)
    asked[0].cancel()  # before the line has looked
    async with asyncio.timeout(10):
        results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(each) for each in results] == [asyncio.CancelledError, type(None), type(None)]
    assert line.held == 0
    assert line._queue._ends == {"": 6.0}, "who has left has had nothing"


async def test_one_that_leaves_as_it_is_sent_away_leaves_once() -> None:
    """It makes room for another tenant, or the service ends, in the turn of the loop in which its client leaves."""
    fleet = Fleet()
    line = a_line(fleet, max_waiting=2)
    stays, goes = ask(line, request(tokens=3)), ask(line, request(tokens=5))
    await held(line, 2)
    another = ask(line, request(tenant="another"))  # for which the last of the greedier tenant is sent away
    goes.cancel()
    await asyncio.sleep(0)
    stays.cancel()
    line.end_all(Unavailable("the service is stopping"))
    async with asyncio.timeout(10):
        results = await asyncio.gather(stays, goes, another, return_exceptions=True)
    assert [type(each) for each in results] == [asyncio.CancelledError, asyncio.CancelledError, Unavailable]
    assert line.held == 0


async def test_one_that_is_held_goes_to_a_replica_that_comes_before_the_line_has_looked() -> None:
    """It has not waited for capacity, which without a queue is refused at once."""
    fleet = Fleet()
    fleet.replicas = {}
    line = a_line(fleet, max_wait_s=0.0, hold_s=60.0)
    asked = ask(line, request())
    await asyncio.sleep(0)
    assert line.held == 1
    fleet.replicas = {"only": None}
    fleet.hear(room=True)
    async with asyncio.timeout(10):
        await asked


def test_what_has_left_a_queue_leaves_it_once() -> None:
    queue: FairQueue[str] = FairQueue({}, 10, 1000)
    entry, _ = queue.push("one", "a", 5)
    assert entry is not None
    queue.push("two", "a", 7)
    for _ in range(2):
        queue.remove(entry)
        assert (len(queue), queue.tokens) == (1, 7)
    queue.pop()
    queue.remove(entry)
    assert (len(queue), queue.tokens) == (0, 0)


SLO = Slo(30.0, 5.0)  # long enough for a busy machine


class Device:
    """One replica of the directory, which carries what the test says."""

    def __init__(self, live: ReplicaDirectory, name: str, prefill: float, longest: int = 8192, pool: str = "p") -> None:
        info = ModelInfo("m", "f", 1000, longest, (1,), "float32", "none")
        self.live, self.name, self.steps, self.running = live, name, 0, 8
        profile = ReplicaProfile(
            name, info, "simulated", name, None, "exact", "", prefill, 0.01, 10_000, 512,
            decode_s=tuple(0.01 + batch / prefill for batch in PROFILED_BATCH_SIZES), max_running=self.running,
            pool=pool,
        )  # fmt: skip
        live.joined(profile)
        self.carries(0)

    def carries(self, sequences: int, queued: int = 0) -> None:
        self.steps += 1
        running = min(sequences, self.running)
        self.live.reported(
            self.name,
            ReplicaLoad(
                running, sequences - running, queued, kv_blocks_free=10_000, kv_blocks_total=10_000, steps=self.steps
            ),
        )

    def full(self) -> None:
        self.carries(20 * self.running, 50_000)


def shedding() -> tuple[ReplicaDirectory, RequestQueue]:
    live = ReplicaDirectory({"p": "p"}, SLO, random.Random(0))
    return live, a_line(live, slo=SLO, shed=True)


async def ended(*tasks: asyncio.Task[None]) -> list[type]:
    async with asyncio.timeout(10):
        return [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)]


async def test_what_no_replica_could_meet_is_shed_at_once_and_is_in_nobodys_way() -> None:
    live, line = shedding()
    device = Device(live, "only", 100.0)
    device.full()
    first = ask(line, request(tokens=100))
    await held(line, 1)
    assert await ended(ask(line, request(tokens=4000, tenant="another"))) == [Overloaded]
    assert line.held == 1, "long before its time is over"
    others = [ask(line, request(tokens=100)) for _ in range(5)]
    await held(line, 6)
    device.carries(0)
    assert await ended(first, *others) == [type(None)] * 6


async def test_what_can_no_longer_be_met_is_shed_though_somebody_is_before_it() -> None:
    """It could be when it came, and not after its wait; the head of the line still can."""
    live, line = shedding()
    device = Device(live, "only", 100.0)
    device.full()
    short, long = ask(line, request(tokens=10)), ask(line, request(tokens=1000))
    await held(line, 2)
    [turn] = [entry.item for entry in line._queue if len(entry.item.request.prompt_ids) == 1000]
    turn.waiting_since -= SLO.ttft_s - 5.0  # as if it had waited for so long
    assert await ended(long) == [Overloaded]
    assert not short.done()
    assert line.held == 1
    short.cancel()


async def test_a_replica_that_comes_lowers_the_ttft_bound_and_one_that_goes_raises_it() -> None:
    live, line = shedding()
    slow, fast = Device(live, "slow", 100.0), Device(live, "fast", 400.0)
    slow.full()
    fast.full()
    asked = ask(line, request(tokens=4000))
    await held(line, 1)
    live.left("fast")
    assert await ended(asked) == [Overloaded]
    fast = Device(live, "fast", 400.0)
    fast.full()
    asked = ask(line, request(tokens=4000))
    await held(line, 1)
    fast.carries(0)
    assert await ended(asked) == [type(None)]


async def test_what_is_left_without_a_replica_is_held_rather_than_shed() -> None:
    live, line = shedding()
    Device(live, "only", 100.0).full()
    asked = ask(line, request(tokens=100))
    await held(line, 1)
    live.left("only")
    assert line._next(asyncio.get_running_loop().time()) is None, "as the line may find it before it has looked around"
    assert line.held == 1
    await asyncio.sleep(3 * SCAN_INTERVAL_S)
    assert not asked.done()
    Device(live, "only", 100.0)
    assert await ended(asked) == [type(None)]


async def test_who_has_room_passes_who_has_not_and_not_for_ever() -> None:
    """Two replicas: the slow one is empty, and only the fast one, which is full, could meet the first in line."""
    live, line = shedding()
    slow, fast = Device(live, "slow", 50.0), Device(live, "fast", 400.0)
    fast.full()
    large = ask(line, request(tokens=4000))
    await held(line, 1)
    assert await ended(*(ask(line, request(tokens=50)) for _ in range(3))) == [type(None)] * 3
    turn = next(iter(line._queue)).item
    turn.waiting_since -= MAX_PASSED_SHARE * (SLO.ttft_s - turn.min_ttft_s)  # as if it had waited for so long
    small = ask(line, request(tokens=50))
    await held(line, 2)
    await asyncio.sleep(3 * SCAN_INTERVAL_S)
    assert not small.done(), "now it is to have its turn at last"
    fast.carries(0)
    assert await ended(large, small) == [type(None)] * 2
    assert slow.steps == 1


async def test_who_waits_for_a_longer_context_is_in_nobodys_way() -> None:
    live = ReplicaDirectory({"p": "p", "q": "q"}, None, random.Random(0))
    line = a_line(live)
    Device(live, "long", 100.0)
    live.left("long")  # its pool may have another
    Device(live, "short", 100.0, longest=64, pool="q")
    large = ask(line, request(tokens=100))
    await held(line, 1)
    assert await ended(ask(line, request(tokens=10))) == [type(None)]
    assert not large.done()
    device = Device(live, "long", 100.0)
    assert await ended(large) == [type(None)]
    device.full()


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(-2, 2)), min_size=1, max_size=20),
    st.integers(0, 10),
)
def test_the_order_of_a_queue_is_that_in_which_it_would_be_emptied(
    entries: list[tuple[str, int, int]], taken: int
) -> None:
    queue: FairQueue[int] = FairQueue({"a": 2.0}, 100, 10**6)
    for number, (tenant, tokens, priority) in enumerate(entries):
        queue.push(number, tenant, tokens, priority=priority)
    for _ in range(min(taken, len(queue) - 1)):
        passed = list(queue.in_turn())
        queue.take(passed[len(passed) // 2])  # others go before their turn
        assert len(queue) == len(passed) - 1
    order = [entry.item for entry in queue.in_turn()]
    assert order == [queue.pop().item for _ in range(len(queue))]


def urgent(priority: int, n: int = 1) -> Request:
    return Request("u", (1, 2, 3), SamplingParams(max_tokens=4, seed=0, n=n), priority=priority)


def full_fleet(places: int) -> Fleet:
    fleet = Fleet()
    fleet.replicas = {"only": SimpleNamespace(profile=SimpleNamespace(max_running=places))}
    return fleet


async def test_one_that_would_take_another_ones_place_is_sent_to_full_replicas() -> None:
    """A replica gives it the place of the least important; an equal one waits here, and so does what is too much."""
    fleet = full_fleet(2)
    line = a_line(fleet)
    with line.priorities.sent(urgent(1)), line.priorities.sent(urgent(1)):
        waits = ask(line, urgent(1))
        await held(line, 1)
        for _ in range(2):
            await asyncio.wait_for(ask(line, urgent(5)), 10)
        with line.priorities.sent(urgent(5, n=2)):
            another = ask(line, urgent(5))
            await held(line, 2)
            await asyncio.wait_for(ask(line, urgent(6)), 10)
        fleet.changed.set()
        await asyncio.wait_for(another, 10)
        assert not waits.done(), "nobody gives way to it"
    fleet.hear(room=True)
    await asyncio.wait_for(waits, 10)
    assert line.priorities.lowest is None


async def test_an_equal_one_waits_though_there_are_places_for_both() -> None:
    """A full replica gives no place of a sequence to one of the same priority."""
    fleet = full_fleet(2)
    line = a_line(fleet)
    with line.priorities.sent(urgent(1)):
        waits = ask(line, urgent(1))
        await held(line, 1)
        waits.cancel()


async def test_it_goes_before_those_that_wait_for_room() -> None:
    fleet = full_fleet(1)
    line = a_line(fleet)
    with line.priorities.sent(urgent(0)):
        first = ask(line, urgent(0))
        await held(line, 1)
        await asyncio.wait_for(ask(line, urgent(3)), 10)
        assert not first.done()
        first.cancel()
