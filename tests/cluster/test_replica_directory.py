"""Several pools behind one router: the best replica of all of them, and the next at once where that refuses."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routed_fleet import POLICY, Fleet, Stand, a_profile, begin, read, request, until

from motley.cluster.routing.attempt import liveness_monitor
from motley.cluster.routing.directory import prediction_cache
from motley.cluster.routing.directory.replica_directory import PROVEN, ReplicaDirectory
from motley.cluster.routing.directory.replica_registry import PublishedReplica
from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.routing.prefix_index.prefix_hash_chain import MAX_PROMPT_PIECES, PIECE_TOKENS, PrefixHashChain
from motley.cluster.routing.queueing import request_queue
from motley.cluster.routing.queueing.request_queue import RoutingConfig
from motley.cluster.routing.router import Router
from motley.replicas.engine.streams.profile_text import profile_to_text
from motley.replicas.errors import DeadlineExceeded, MotleyError, Overloaded, Unavailable
from motley.replicas.types import (
    ReplicaLoad,
    Request,
    SamplingParams,
    StreamMessage,
)


async def test_the_faster_pool_is_taken_until_the_other_is_as_soon() -> None:
    slow, fast = Stand(a_profile(0.5)), Stand(a_profile(2.0, running=8))
    for stand in (slow, fast):
        stand.gate.clear()
    fleet = Fleet(slow=[slow], fast=[fast])
    streams = [await begin(fleet.router) for _ in range(4)]
    assert fleet.sent == {"fast-0": 4}
    streams += [await begin(fleet.router) for _ in range(20)]
    assert fleet.sent["slow-0"] > 0, "what is full is no longer the fastest"
    assert fleet.sent["fast-0"] >= 8
    for stream in streams:
        await stream.aclose()


async def test_equals_have_equally_many() -> None:
    stands = [Stand() for _ in range(4)]
    for stand in stands:
        stand.gate.clear()
    fleet = Fleet(one=stands[:2], two=stands[2:])
    streams = [await begin(fleet.router) for _ in range(20)]
    assert sorted(fleet.sent.values()) == [5, 5, 5, 5]
    for stream in streams:
        await stream.aclose()
    assert not fleet.router._suspects.carried


async def test_requests_of_one_moment_are_spread() -> None:
    stands = [Stand() for _ in range(4)]
    for stand in stands:
        stand.gate.clear()
    fleet = Fleet(one=stands[:2], two=stands[2:])
    streams = await asyncio.gather(*(begin(fleet.router) for _ in range(40)))
    assert sorted(fleet.sent.values()) == [10, 10, 10, 10]
    for stream in streams:
        await stream.aclose()


@pytest.mark.parametrize("first", [0.25, 1.0])
async def test_one_that_measured_itself_while_others_started_is_held_to_be_as_fast(first: float) -> None:
    """Whichever comes first. Nothing would be sent to it that could correct its profile."""
    stands = [Stand(a_profile(first)), Stand(a_profile(1.25 - first))]
    for stand in stands:
        stand.gate.clear()
    fleet = Fleet(one=stands)
    streams = [await begin(fleet.router) for _ in range(20)]
    assert sorted(fleet.sent.values()) == [10, 10]
    for stream in streams:
        await stream.aclose()


async def test_a_slower_device_is_not_held_to_be_as_fast() -> None:
    stands = [Stand(replace(a_profile(speed), device_name=f"of speed {speed}")) for speed in (0.25, 1.0)]
    for stand in stands:
        stand.gate.clear()
    fleet = Fleet(one=stands)
    streams = [await begin(fleet.router) for _ in range(4)]
    assert fleet.sent == {"one-1": 4}
    for stream in streams:
        await stream.aclose()


async def test_one_that_refuses_is_followed_by_the_next_in_another_pool() -> None:
    fast, slow = Stand(a_profile(4.0)), Stand()
    fast.most = 0
    fleet = Fleet(fast=[fast], slow=[slow])
    assert await read(fleet.router) == [0, 1, 2, 3]
    assert fleet.sent == {"fast-0": 1, "slow-0": 1}
    slow.most = 0
    with pytest.raises(Overloaded, match="full"):
        await read(fleet.router)
    demand = fleet.router.fleet().demand
    assert (demand.requests, demand.refused, demand.output_tokens) == (2, 1, 4)


async def test_a_pool_whose_replicas_have_gone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody was told."""
    monkeypatch.setattr(liveness_monitor, "ELSEWHERE_S", 0.01)
    fleet = Fleet(fast=[Stand(a_profile(4.0))], slow=[Stand()])
    fleet.router._liveness._tick_s = 0.01
    fleet.pools["fast"].replicas.clear()
    assert await read(fleet.router) == [0, 1, 2, 3]
    assert fleet.sent == {"slow-0": 1}


async def test_a_stream_goes_on_in_another_pool_of_the_same_numerics_first() -> None:
    lost = Stand(a_profile(8.0, "a"))
    fleet = Fleet(lost=[lost], near=[Stand(a_profile(4.0, "b"))], far=[Stand(a_profile(0.5, "a"))])
    lost.gate.clear()
    stream = await begin(fleet.router)
    lost.dies = True
    lost.gate.set()
    rest = [token async for message in stream for delta in message.deltas for token in delta.token_ids]
    assert rest == [1, 2, 3]
    assert fleet.sent == {"lost-0": 1, "far-0": 1}
    counted = {pool: each.e2e.spread().count for pool, each in fleet.router.stats.pools.items()}
    assert {pool for pool, count in counted.items() if count} == {"far"}
    assert {each.replica_id: each.state for each in fleet.router.fleet().replicas}["lost-0"] == "suspect"


async def test_what_is_too_long_for_one_goes_where_it_fits() -> None:
    fleet = Fleet(short=[Stand(a_profile(8.0, longest=64))], long=[Stand()])
    await read(fleet.router, request(prompt=100))
    assert fleet.sent == {"long-0": 1}
    assert (await fleet.router.profile()).model.max_model_len == 4096, "the door lets through what any can take"


async def test_one_that_drains_is_not_chosen_and_keeps_its_streams() -> None:
    fast, slow = Stand(a_profile(4.0)), Stand()
    fleet = Fleet(fast=[fast], slow=[slow])
    fast.gate.clear()
    stream = await begin(fleet.router)
    assert await fleet.router.drain_replica("fast-0")
    assert not await fleet.router.drain_replica("nobody")
    await read(fleet.router)
    assert fleet.sent == {"fast-0": 1, "slow-0": 1}
    states = {each.replica_id: each.state for each in fleet.router.fleet().replicas}
    assert states == {"fast-0": "draining", "slow-0": "ready"}
    fast.gate.set()
    assert len([message async for message in stream]) == 3
    assert fleet.sent == {"fast-0": 1, "slow-0": 1}


async def test_what_another_ingress_has_drained_is_heard_of() -> None:
    fleet = Fleet(fast=[Stand(a_profile(4.0))], slow=[Stand()])
    told = PublishedReplica({"profile": profile_to_text(a_profile(4.0))}, {"load": asdict(ReplicaLoad(draining=True))})
    fleet.registry.update("fast", {"fast-0": told})
    await read(fleet.router)
    assert fleet.sent == {"slow-0": 1}


def test_an_older_word_of_an_idle_replica_takes_nothing_back() -> None:
    """It was on its way through Serve's controller: as many steps, and all else as it was before."""
    live = ReplicaDirectory({"p": "p"}, None, random.Random(0))
    live.joined(replace(a_profile(), replica_id="r", pool="p"))
    asked = request(prompt=PIECE_TOKENS + 1)
    idle = ReplicaLoad(kv_blocks_free=4000, kv_blocks_total=4000, steps=7)
    live.reported("r", idle)
    live.reported("r", replace(idle, weights_version=1, weights_contents="new"))
    live.prefixes.add(live.replicas["r"].row, PrefixHashChain(asked)[:])
    live.reported("r", idle)
    assert live.replicas["r"].load.weights_contents == "new"
    assert live.prefixes.depths(PrefixHashChain(asked)), "of the new weights"
    live.drains("r", replace(idle, weights_version=1, weights_contents="new", draining=True))
    assert not live.dispatch([asked]).order
    live.reported("r", replace(idle, weights_version=1, weights_contents="new"))
    live.heard("r", idle, live.clock())
    assert not live.dispatch([asked]).order
    assert [each.state for each in live.status(())] == ["draining"]


async def test_what_one_is_seen_to_do_is_thought_of_its_equals() -> None:
    """Else the first to be tried, which does better than its profile says, would have nearly all of them."""
    fleet = Fleet(one=[Stand(), Stand()], two=[Stand(), Stand()])
    for _ in range(60):
        await read(fleet.router, request(prompt=1500))
    pools = Counter(name[:3] for name in fleet.sent.elements())
    within = [fleet.sent[f"{pool}-{number}"] for pool in pools for number in (0, 1)]
    assert min(within) >= 5, fleet.sent


async def test_a_prompt_goes_where_its_beginning_is() -> None:
    fleet = Fleet(one=[Stand(), Stand()], two=[Stand(), Stand()])
    beginning = request(prompt=800)
    await read(fleet.router, beginning)
    [holder] = fleet.sent
    for _ in range(5):
        await read(fleet.router, replace(beginning, prompt_ids=beginning.prompt_ids + request(prompt=50).prompt_ids))
    assert fleet.sent == {holder: 6}
    live = fleet.router.live
    assert live.prefixes.depths(PrefixHashChain(beginning))
    assert not live.prefixes.depths(PrefixHashChain(replace(beginning, cache_salt=b"another's")))
    await fleet.router.flush(None)
    assert not live.prefixes.depths(PrefixHashChain(beginning))


async def test_without_any_replica_a_request_is_held_until_one_comes() -> None:
    fleet = Fleet(one=[], two=[])
    task = asyncio.create_task(read(fleet.router))
    await until(lambda: fleet.router.fleet().demand.held == 1)
    fleet.pools["two"].replicas["two-0"] = Stand()
    fleet.tell()
    assert await task == [0, 1, 2, 3]
    assert fleet.router.fleet().demand.held == 0


async def test_what_is_held_ends_with_its_deadline_its_timeout_and_the_service() -> None:
    fleet = Fleet(RoutingConfig(hold_s=0.05), one=[], two=[])
    with pytest.raises(DeadlineExceeded):
        await read(fleet.router, request(deadline_s=0.01))
    with pytest.raises(Unavailable, match="none has come"):
        await read(fleet.router)
    held = Fleet(one=[], two=[])
    task = asyncio.create_task(read(held.router))
    left = asyncio.create_task(read(held.router))
    await until(lambda: held.router.fleet().demand.held == 2)
    left.cancel()
    await until(lambda: held.router.fleet().demand.held == 1)
    held.router.end_streams()
    with pytest.raises(Unavailable, match="stopping"):
        await task


async def test_replicas_that_come_and_go_leave_nothing_behind() -> None:
    fleet = Fleet(one=[Stand()], two=[Stand()])
    for number in range(30):
        pool = fleet.pools["two"]
        pool.replicas.clear()
        pool.replicas[f"new-{number}"] = Stand(a_profile(3.0))
        fleet.tell()
        await read(fleet.router)
    assert {each.replica_id for each in fleet.router.fleet().replicas} == {"one-0", "new-29"}
    assert fleet.sent == {f"new-{number}": 1 for number in range(30)}
    assert len(fleet.router.live.directory._rows) == 8, "rows are used again"


async def test_full_replicas_are_waited_for_in_turns_by_weight() -> None:
    only = Stand(a_profile(running=1))
    only.most = 1
    fleet = Fleet(RoutingConfig(max_wait_s=20.0, weights={"heavy": 3.0}), one=[only])
    only.gate.clear()
    first = asyncio.create_task(read(fleet.router))
    await until(lambda: only.running == 1)
    tasks = [
        asyncio.create_task(read(fleet.router, request(tenant=tenant, prompt=50)))
        for _ in range(12)
        for tenant in ("light", "heavy")
    ]
    await until(lambda: fleet.router.fleet().demand.held == 24)
    only.gate.set()
    await asyncio.gather(first, *tasks)
    shares = Counter(each.tenant for each in only.seen[1:13])
    assert 8 <= shares["heavy"] <= 10, shares
    assert fleet.router.fleet().demand.refused == 0


class Queueing(Stand):
    """It has a queue of its own, and is as slow as 10 ms for a token."""

    def __init__(self) -> None:
        super().__init__(a_profile(running=1))
        self.turn, self.waiting = asyncio.Lock(), 0

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        self.waiting += 1
        async with self.turn:
            self.waiting -= 1
            async with aclosing(super().generate(request)) as messages:
                async for message in messages:
                    yield message
                    await asyncio.sleep(0.01)

    async def load(self) -> ReplicaLoad:
        return replace(await super().load(), waiting=self.waiting)


async def test_an_ingress_is_not_crowded_out_by_another_that_hears_of_room_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_queue, "STARVED_S", 0.05)
    only = Queueing()
    fleet = Fleet(RoutingConfig(max_wait_s=20.0), one=[only])
    other = Router(fleet.pools, POLICY, RoutingConfig(max_wait_s=20.0), fleet.registry)

    async def tell() -> None:
        while True:
            await asyncio.sleep(0.05)
            stats = {"load": asdict(await only.load())}
            fleet.registry.update("one", {"one-0": PublishedReplica({"profile": profile_to_text(only.shown)}, stats)})

    telling = asyncio.create_task(tell())
    flood = [asyncio.create_task(read(fleet.router, request(tenant="many"))) for _ in range(40)]
    await until(lambda: len(only.seen) == 5)
    await until(lambda: other.live.directory.own_share() < 0.5)  # the other one has heard of it
    before = len(only.seen)
    await read(other, request(tenant="one"))
    tenants = [each.tenant for each in only.seen]
    telling.cancel()
    await asyncio.gather(*flood)
    assert tenants.index("one") - before < 16, (
        "half of those that waited: all go first if it only waits to hear of room"
    )


async def test_the_queue_has_an_end() -> None:
    only = Stand(a_profile(running=1))
    only.most = 1
    fleet = Fleet(RoutingConfig(max_wait_s=0.3, max_waiting=2), one=[only])
    only.gate.clear()
    stream = await begin(fleet.router)
    tasks = [asyncio.create_task(read(fleet.router)) for _ in range(3)]
    with pytest.raises(Overloaded, match="2 requests"):
        await tasks[2]
    late = asyncio.create_task(read(fleet.router, request(tenant="other", deadline_s=0.02)))
    results = await asyncio.gather(*tasks[:2], late, return_exceptions=True)
    assert Counter(type(each) for each in results) == {Overloaded: 2, DeadlineExceeded: 1}
    await stream.aclose()
    only.gate.set()
    await until(lambda: not only.running)
    assert await read(fleet.router) == [0, 1, 2, 3]


async def test_without_a_queue_what_is_full_is_refused_at_once() -> None:
    only = Stand()
    only.most = 0
    fleet = Fleet(one=[only])
    with pytest.raises(Overloaded, match="full"):
        await read(fleet.router)
    assert fleet.sent == {"one-0": 1}


async def test_a_deadline_that_nobody_can_meet_is_refused_once_predictions_are_proven() -> None:
    fleet = Fleet(one=[Stand()])
    asked = request(prompt=4000, deadline_s=0.2)  # a second of work
    await read(fleet.router, asked)
    for member in fleet.router.live.replicas.values():
        member.observed = PROVEN
    sent = sum(fleet.sent.values())
    with pytest.raises(Overloaded) as caught:
        await read(fleet.router, request(prompt=4000, deadline_s=0.2))
    assert caught.value.code == "deadline_unmeetable"
    assert caught.value.retry_after_s
    assert sum(fleet.sent.values()) == sent
    await read(fleet.router, request(prompt=4000, deadline_s=30.0))
    await read(fleet.router, request(prompt=20, deadline_s=0.2))


async def test_what_misses_the_objectives_is_shed_or_served_late() -> None:
    slo = Slo(0.2, 0.05)
    late = Fleet(RoutingConfig(slo=slo, max_wait_s=5.0), one=[Stand()])
    assert await read(late.router, request(prompt=4000)) == [0, 1, 2, 3]
    shed = Fleet(RoutingConfig(slo=slo, max_wait_s=5.0, shed=True), one=[Stand()])
    with pytest.raises(Overloaded, match="predicted"):
        await read(shed.router, request(prompt=4000))
    assert await read(shed.router, request(prompt=100)) == [0, 1, 2, 3]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.floats(0.2, 5.0)), max_size=60))
def test_the_directory_knows_exactly_who_is_there(changes: list[tuple[bool, int, float]]) -> None:
    live, present = ReplicaDirectory({"p": "p"}, None, random.Random(0)), dict[str, float]()
    for joins, number, speed in changes:
        name = f"r{number}"
        if joins and name not in present:
            live.joined(replace(a_profile(speed), replica_id=name, pool="p", device_name=f"of speed {speed}"))
            present[name] = speed
        elif not joins:
            live.left(name)
            present.pop(name, None)
        order = list(live.dispatch([request(prompt=2000)]).order)
        assert len(order) == min(len(present), 8)
        assert set(order) <= set(present)
        if present:
            assert present[order[0]] >= max(present.values()) / 1.06, "the fastest of those that are there"


@given(st.integers(1, 400), st.integers(0, 399), st.binary(max_size=8))
def test_chains_are_alike_as_far_as_prompts_are(prompt: int, differs: int, salt: bytes) -> None:
    asked = replace(request(prompt=prompt), cache_salt=salt)
    ids = asked.prompt_ids
    other = replace(asked, prompt_ids=(*ids[:differs], *(token + 1 for token in ids[differs:])))
    chain, another = PrefixHashChain(asked), PrefixHashChain(other)
    assert len(chain) == (prompt - 1) // PIECE_TOKENS
    assert [PrefixHashChain(asked)[at] for at in range(len(chain))] == chain[:]
    alike = [one == two for one, two in zip(chain, another, strict=True)]
    assert alike == [(at + 1) * PIECE_TOKENS <= differs for at in range(len(chain))]
    assert not set(chain) & set(PrefixHashChain(replace(asked, cache_salt=salt + b"x")))
    assert len(PrefixHashChain(request(prompt=PIECE_TOKENS * MAX_PROMPT_PIECES + 100))) == MAX_PROMPT_PIECES


async def test_what_is_told_is_for_ever_consistent_with_what_was_sent() -> None:
    """Whatever comes of requests, nothing is counted of them in the end."""
    rng = random.Random(5)
    stands = [Stand(a_profile(rng.uniform(0.5, 2.0))) for _ in range(4)]
    fleet = Fleet(one=stands[:2], two=stands[2:])

    async def one() -> None:
        stand = rng.choice(stands)
        stand.most = rng.choice([0, 3, 10**6])
        asked = request(tokens=rng.randrange(1, 9), prompt=rng.randrange(1, 300))
        try:
            async with aclosing(fleet.router.stream(asked)) as messages:
                async for _ in messages:
                    if rng.random() < 0.1:
                        return
        except MotleyError:
            pass

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(20)))
    directory = fleet.router.live.directory
    assert not directory._carried.any()
    assert not fleet.router._suspects.carried
    for member in fleet.router.live.replicas.values():
        fleet.router.live._hear(member.profile.replica_id, ReplicaLoad(steps=10**9), fleet.router.live.clock())
    assert not directory._sent.any()
    assert not directory._sent_tokens.any()


async def test_one_prediction_answers_all_that_is_asked_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a deadline, and objectives that it is shed for, is predicted three times; what is heard meanwhile
    counts.
    """
    monkeypatch.setattr(prediction_cache, "SAME_S", 60.0)  # however busy the machine is
    slo = Slo(3.0, 0.1)
    fleet = Fleet(
        RoutingConfig(slo=slo, shed=True, max_wait_s=5.0), one=[Stand(), Stand()], two=[Stand(a_profile(0.5))]
    )
    live, made = fleet.router.live, list[Any]()
    predict = live.directory.predict_parts
    monkeypatch.setattr(live.directory, "predict_parts", lambda now, ask: made.append(ask) or predict(now, ask))
    for member in live.replicas.values():
        member.observed = PROVEN
    await read(fleet.router, request(deadline_s=30.0))
    assert len(made) == 1
    asked = request(deadline_s=30.0)
    first = live.dispatch([asked]).best
    assert first is not None
    live.reported(first, ReplicaLoad(60, 0, 9000, 4000, 4000, steps=10**6))
    again = live.dispatch([replace(asked, deadline_s=29.0)])
    assert again.best != first
    again.to(again.best or "")
    assert live.has_capacity(asked, allow_late=False)
    assert len(made) == 4, "it was sent somewhere meanwhile"
    for other in (replace(asked, cache_salt=b"another's"), replace(asked, output_ids=((1,),)), request()):
        made.clear()
        live.soonest(other)
        live.has_capacity(other, allow_late=False)
        live.dispatch([other])
        assert len(made) == 1


def test_a_profile_of_another_release_is_none() -> None:
    """Times of other batches than are known here tell nothing; the replica serves all the same."""
    live = ReplicaDirectory({"pool": "pool"}, Slo(3.0, 0.1), random.Random(0))
    live.joined(replace(a_profile(), replica_id="one", pool="pool", decode_s=(0.01, 0.02)))
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=4, seed=0))
    assert live.dispatch([request]).best == "one"
