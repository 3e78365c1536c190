"""Prefixes from a store: nobody can tell, whatever the store does, and nothing is left anywhere."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from fake_prefixes import FAULTS, BadStore, prefixes
from fake_runner import AheadRunner, FakeRunner
from hypothesis import given, settings
from letters import Clock

from motley.replicas.blocks import BlockPool
from motley.replicas.engine import EngineCore
from motley.replicas.limits import Limits
from motley.replicas.plan import StepPlan
from motley.replicas.prefix.errands import Fetch, Release, Save
from motley.replicas.prefix.keys import StoreKeys
from motley.replicas.prefix.known import Known
from motley.replicas.prefix.popular import Popular
from motley.replicas.prefix.prospects import READ_S, Prospects, Sightings, leading_worth, patience_s
from motley.replicas.protocol import FinishReason, Pooling, Request, SamplingParams, Stored, StreamMessage
from motley.replicas.scheduler import Scheduler
from motley.replicas.sequence import State
from motley.replicas.swap import Swap, SwapRates

VOCAB = 27
RUNNERS = [FakeRunner, AheadRunner]
KEPT = 16  # blocks of the host for preempted sequences, before those of prefixes


class Bench:
    """An engine over a fake runner, with a store."""

    def __init__(
        self,
        store: BadStore | None = None,
        runner: type[FakeRunner] = FakeRunner,
        *,
        blocks: int = 64,
        budget: int = 32,
        swaps: bool = False,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        self.clock = clock or Clock()
        self.runner = runner(blocks, VOCAB)
        self.prefixes, self.courier = None, None
        if store is not None:
            self.prefixes, self.courier = prefixes(self.runner, store, self.clock, first=KEPT, **options)
        self.core = EngineCore(
            self.runner,
            Scheduler(
                BlockPool(blocks),
                max_batch_tokens=budget,
                max_running=8,
                swap=Swap(KEPT, SwapRates(1e-9, 1e-9, 1.0)) if swaps else None,
                prefixes=self.prefixes,
            ),
            Limits(VOCAB, min(128, 16 * blocks), (26,)),
            None,
            self.clock,
        )

    def run(self, requests: list[Request], *, apart: int = 0) -> list[list[StreamMessage]]:
        """All messages of each; one comes every `apart` steps. Nothing is held at the end."""
        seen: list[list[StreamMessage]] = [[] for _ in requests]
        waiting = list(enumerate(requests))
        for step in range(5000):
            while waiting and step >= apart * waiting[0][0]:
                self.core.add(*waiting.pop(0))
            if not self.core.busy and not waiting:
                break
            for emission in self.core.step():
                assert emission.error is None, emission.error
                seen[emission.key].append(emission.message)
            self.core.scheduler.pool.check()
        self.settle()
        return seen

    def settle(self) -> None:
        """Everything comes back; then the host's blocks are free, every one of them once."""
        assert not self.core.busy
        self.core.scheduler.pool.check(idle=True)
        self.core.scheduler.swap.pool.check_idle()
        if self.prefixes is None or self.courier is None:
            return
        for _ in range(100):
            self.core.step()
            if not self.core.launched and not self.courier.under_way and not self.prefixes.pool.left:
                break
        self.prefixes.pool.check_idle()
        assert not self.prefixes.waits


def request(prompt: list[int], **params: Any) -> Request:
    given = {
        name: params.pop(name)
        for name in ("deadline_s", "priority", "cache_salt", "tenant", "pooling")
        if name in params
    }
    params = {"temperature": 0.0, "max_tokens": 6, "seed": 5, "ignore_eos": True} | params
    return Request("r", tuple(prompt), SamplingParams(**params), **given)


def ids(messages: list[StreamMessage]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for delta in (delta for message in messages for delta in message.deltas):
        found.setdefault(delta.index, []).extend(delta.token_ids)
    return found


def cached(messages: list[StreamMessage]) -> int | None:
    return messages[0].cached_tokens


def told(messages: list[StreamMessage]) -> list[tuple[int, int | None] | None]:
    """Of the prompt in the store, by the first message and by the last."""
    assert not any(message.stored for message in messages[1:-1])
    every = [messages[0].stored, messages[-1].stored]
    return [None if stored is None else (stored.tokens, stored.absent) for stored in every]


def prompt(family: int, length: int) -> list[int]:
    """Those of one family begin alike."""
    return [(family * 5 + i // 3) % 25 for i in range(length)]


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 9, "seed": 3},
    {"temperature": 0.8, "n": 2, "logprobs": 2},
    {"prompt_logprobs": 1, "max_tokens": 3},
    {"frequency_penalty": 0.4, "max_tokens": 12},
]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batch=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 70), st.sampled_from(SAMPLINGS), st.integers(-1, 1)),
        min_size=2,
        max_size=6,
    ),
    before=st.lists(st.tuples(st.integers(0, 2), st.integers(16, 70)), max_size=3),
    blocks=st.integers(8, 14),
    room=st.integers(4, 20),
    value_blocks=st.sampled_from([1, 2]),
    budget=st.integers(8, 48),
    apart=st.integers(0, 4),
    faulty=st.sampled_from([0.0, 0.3, 1.0]),
    swaps=st.booleans(),
    runner=st.sampled_from(RUNNERS),
    seed=st.integers(0, 99),
)
def test_nobody_can_tell(
    batch: list[tuple[int, int, dict[str, Any], int]],
    before: list[tuple[int, int]],
    blocks: int,
    room: int,
    value_blocks: int,
    budget: int,
    apart: int,
    faulty: float,
    swaps: bool,
    runner: type[FakeRunner],
    seed: int,
) -> None:
    """Greedy and seeded, whatever the store has, does, and how long it takes: each says what it says without one.

    The runner reads every token of a history from its cells: KV of another prompt, or that comes too late, shows.
    """
    rng, clock = random.Random(seed), Clock()
    store = BadStore(clock, seed=seed)
    other = Bench(store, clock=clock, value_blocks=value_blocks)
    other.run([request(prompt(*one)) for one in before])
    store.fault = lambda: rng.choice(FAULTS) if rng.random() < faulty else "none"
    requests = [request(prompt(family, length), priority=p, **sampling) for family, length, sampling, p in batch]
    bench = Bench(
        store, runner, blocks=blocks, budget=budget, swaps=swaps, clock=clock, room=room, value_blocks=value_blocks,
        turns=lambda: rng.randrange(4),
    )  # fmt: skip
    found = bench.run(requests, apart=apart)
    alone = Bench(blocks=200, budget=budget).run(requests)
    assert [ids(messages) for messages in found] == [ids(messages) for messages in alone]
    assert [_logprobs(messages) for messages in found] == [_logprobs(messages) for messages in alone]


def _logprobs(messages: list[StreamMessage]) -> list[Any]:
    of_prompt = [message.prompt_logprobs for message in messages if message.prompt_logprobs]
    deltas = [delta for message in messages for delta in message.deltas]
    return [of_prompt, *[[one for delta in deltas if delta.index == i for one in delta.logprobs or ()] for i in (0, 1)]]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("value_blocks", [1, 2, 4])
def test_what_one_replica_has_computed_another_one_does_not(runner: type[FakeRunner], value_blocks: int) -> None:
    """All of it but the last token's block, and usage says so; what is beyond the last full value is computed."""
    store = BadStore(Clock())
    first = Bench(store, runner, value_blocks=value_blocks)
    first.run([request(prompt(1, 100))])
    second = Bench(store, runner, value_blocks=value_blocks)
    [messages] = second.run([request(prompt(1, 100))])
    held = 100 // (16 * value_blocks) * 16 * value_blocks
    assert cached(messages) == held
    assert sum(plan.num_tokens for plan in second.runner.plans) == 100 - held + 5
    load = second.core.load()
    assert load.external_hit_tokens == load.external_queried_tokens == held
    assert second.prefixes is not None
    assert second.prefixes.told(store.stats()).outcomes == {"hit": 1}


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_the_store_has_of_a_prompt_is_told_once_it_is_known(runner: type[FakeRunner]) -> None:
    """With the first message, and with the last if more is known by then: never of the output."""
    store = BadStore(Clock())
    first = Bench(store, runner, value_blocks=2, after=2)
    asked = request(prompt(1, 100), max_tokens=20)
    assert told(first.run([asked])[0]) == [(0, 0), None], "it was not there, and one request is no reason to store it"
    assert told(first.run([asked])[0]) == [(0, None), (96, None)], "written meanwhile"
    assert told(first.run([asked])[0]) == [(96, None), None]
    other = Bench(store, runner, value_blocks=2)
    messages = other.run([asked])[0]
    assert told(messages) == [(96, None), None], "read"
    assert other.prefixes is not None
    assert other.prefixes.prospects is not None
    assert messages[0].stored == Stored(96, None, other.prefixes.fetch_s)
    assert other.prefixes.fetch_s > 0
    assert told(other.run([request(prompt(1, 70))])[0]) == [(64, None), None]
    assert told(other.run([request([*prompt(1, 40), *prompt(3, 30)])])[0])[0] == (32, 32), "the rest is another's"
    assert told(Bench(None, runner).run([asked])[0]) == [None, None]
    alone = Bench(BadStore(Clock()), runner, value_blocks=2, after=1)
    assert told(alone.run([asked])[0]) == [(0, 0), (96, None)], "it has made up itself for what was missing"
    rest = replace(asked, output_ids=(tuple(range(20))[:17],))
    again = Bench(store, runner, value_blocks=2)
    assert told(again.run([rest])[0]) == [(96, None), None], "of one that was begun elsewhere: its prompt alone"


def test_who_would_have_stored_it_tells_that_it_is_there() -> None:
    store = BadStore(Clock())
    one, two = Bench(store, after=2), Bench(store, after=2)
    asked = request(prompt(1, 100), max_tokens=20)
    for bench in (one, two, one):
        bench.run([asked])
    written = store.stats().stored
    assert told(two.run([asked])[0]) in ([(0, None), (96, None)], [(96, None), None])
    assert store.stats().stored == written == 6


@pytest.mark.parametrize(("fault", "absent"), [("miss", 0), ("few", 32), ("flip", 0), ("raise", 0), ("late", None)])
def test_what_was_fetched_in_vain_is_told(fault: str, absent: int | None) -> None:
    store = BadStore(Clock())
    Bench(store, value_blocks=2).run([request(prompt(1, 70))])
    second = Bench(store, value_blocks=2, after=99, clock=store._clock)  # type: ignore[arg-type]
    faults = iter([fault])
    store.fault = lambda: next(faults, "none")
    [messages] = second.run([request(prompt(1, 70))])
    if fault == "few":
        assert told(messages)[0] in [(0, 0), (32, 32)]
    else:
        assert told(messages)[0] == (0, absent)


def test_what_is_flushed_is_not_told_of_though_its_writing_comes_back_later() -> None:
    store, turns = BadStore(Clock()), 3
    bench = Bench(store, turns=lambda: turns)
    bench.core.add(0, request(prompt(1, 50)))
    while not any(isinstance(errand, Save) for errand in bench.courier.sent):  # type: ignore[union-attr]
        bench.core.step()
    bench.core.scheduler.forget(None)
    while bench.core.busy:
        bench.core.step()
    bench.settle()
    assert bench.prefixes is not None
    assert not bench.prefixes._known._seen


def test_what_is_known_of_a_store_is_believed_for_a_while() -> None:
    clock = Clock()
    known = Known(clock, capacity=4)
    known.there([b"a", b"b", b"c"])
    assert known.leading([b"a", b"b", b"x", b"c"]) == 2
    known.there([b"d", b"e"])
    assert known.leading([b"a", b"b", b"c"]) == 2, "a prefix is forgotten from its end"
    known.gone([b"b", b"x"])
    assert known.leading([b"a", b"b"]) == 1
    clock.now += 50
    known.there([b"d"])
    clock.now += 50
    assert [known.leading([key]) for key in (b"a", b"d")] == [0, 1]
    known.forget()
    assert known.leading([b"d"]) == 0


def test_the_name_of_what_is_shared_is_that_of_its_secret_and_its_identity() -> None:
    names = [StoreKeys(secret, identity).name for secret in (b"a" * 32, b"b" * 32) for identity in (b"1", b"2")]
    assert len(set(names)) == 4
    assert StoreKeys(b"a" * 32, b"1").name == names[0]
    assert Bench(None).core.scheduler.prefixes.shares == ""


def test_a_prompt_that_values_fill_to_its_end_leaves_its_last_token() -> None:
    store = BadStore(Clock())
    Bench(store, value_blocks=2).run([request(prompt(1, 64))])
    second = Bench(store, value_blocks=2)
    [messages] = second.run([request(prompt(1, 64))])
    assert cached(messages) == 48
    assert ids(messages) == ids(Bench().run([request(prompt(1, 64))])[0])


def test_what_is_known_in_part_is_taken_in_part() -> None:
    """Of the store its leading values, of the device what it has, in whatever order they were lost."""
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 100))])
    whole = sorted(store._values)
    third = Bench(store, after=99)
    third.run([request(prompt(1, 40))])  # two blocks of it are on the device
    lost = third.courier.fetches[0].keys[1]  # type: ignore[union-attr]
    del store._values[lost]
    [messages] = third.run([request(prompt(1, 100))])
    assert cached(messages) == 96
    assert third.core.load().external_hit_tokens == 32 + 64
    fourth = Bench(store)
    [messages] = fourth.run([request(prompt(1, 100))])
    assert cached(messages) == 16
    assert fourth.core.load().external_queried_tokens == 96
    assert sorted(store._values) == whole, "what was lost is stored again"


def test_what_the_device_loses_while_the_rest_is_fetched_is_computed() -> None:
    """Two blocks are here and four come: those are of no use without the two."""
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 100))])
    bench = Bench(store, turns=lambda: 2, after=99)
    bench.run([request(prompt(1, 33))])
    bench.core.add(0, request(prompt(1, 100)))
    bench.core.step()
    [parked] = bench.core.scheduler.waiting
    assert parked.state is State.WAITING_KV
    bench.core.scheduler.pool.forget_prefixes()
    seen = [emission.message for _ in range(30) for emission in bench.core.step()]
    assert cached(seen) == 0
    assert ids(seen) == ids(Bench().run([request(prompt(1, 100))])[0])
    bench.settle()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("none", "few", "many")])
def test_whatever_is_wrong_is_a_miss_with_its_name(fault: str) -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100)), request(prompt(2, 100))])
    store.fault = lambda: fault
    second = Bench(store, clock=clock)
    [messages] = second.run([request(prompt(1, 100))])
    assert cached(messages) == 0
    assert ids(messages) == ids(Bench().run([request(prompt(1, 100))])[0])
    named = {"raise": "error", "late": "timeout", "miss": "miss", "cut": "size", "empty": "size", "zeros": "magic"}
    assert second.prefixes is not None
    [outcome] = second.prefixes.told(store.stats()).outcomes
    assert outcome in {named.get(fault, "seal"), *(("magic", "version", "geometry") if fault == "flip" else ())}
    assert second.core.load().external_hit_tokens == 0


def test_what_cannot_be_opened_is_stored_anew() -> None:
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 50))])
    key, value = next(iter(store._values.items()))
    store._values[key] = replace(value, data=value.data[:-1] + bytes([value.data[-1] ^ 1]))
    Bench(store, after=9).run([request(prompt(1, 50))])
    third = Bench(store)
    [messages] = third.run([request(prompt(1, 50))])
    assert cached(messages) == 48


def test_tenants_do_not_meet_and_cache_groups_do() -> None:
    """Nor does another model, another version of its weights, or another secret's value."""
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 100), tenant="one", cache_salt=b"one")])
    owners = [
        ({"tenant": "one", "cache_salt": b"one"}, 96),
        ({"tenant": "two", "cache_salt": b"two"}, 0),
        ({"tenant": "two", "cache_salt": b"one"}, 96),
    ]
    for owner, held in owners:
        assert cached(Bench(store).run([request(prompt(1, 100), **owner)])[0]) == held
    other = Bench(store, identity=b"that model")
    assert cached(other.run([request(prompt(1, 100), cache_salt=b"one")])[0]) == 0


def test_a_value_from_another_tenants_key_is_not_opened() -> None:
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 33), cache_salt=b"one")])
    stolen = [value for _, value in sorted(store._values.items())]
    thief = Bench(store)
    thief.run([request(prompt(1, 33), cache_salt=b"two")])
    assert thief.courier is not None
    for key, value in zip(thief.courier.fetches[0].keys, stolen, strict=True):
        store._values[key] = value
    again = Bench(store)
    [messages] = again.run([request(prompt(1, 33), cache_salt=b"two")])
    assert cached(messages) == 0
    assert again.prefixes is not None
    assert again.prefixes.told(store.stats()).outcomes == {"seal": 1}


def test_others_go_on_while_one_waits() -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100))])
    bench = Bench(store, clock=clock, turns=lambda: 5)
    bench.core.add(0, request(prompt(1, 100)))
    bench.core.add(1, request(prompt(2, 5)))
    bench.core.step()
    first, second = sorted(bench.core.scheduler.sequences, key=lambda one: one.id)
    assert (first.state, second.state) == (State.WAITING_KV, State.RUNNING)
    for _ in range(4):
        bench.core.step()
    assert len(second.output_ids) >= 4
    assert first.state is State.WAITING_KV
    while bench.core.busy:
        bench.core.step()
    bench.settle()


@pytest.mark.parametrize("how", ["cancel", "deadline", "hold"])
@pytest.mark.parametrize("when", ["under way", "here"])
def test_whoever_goes_while_it_waits_leaves_nothing(how: str, when: str) -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100))])
    bench = Bench(store, clock=clock, blocks=10, turns=lambda: 0 if when == "here" else 3)
    bench.core.add(0, request(prompt(2, 30), max_tokens=90))
    for _ in range(40):
        bench.core.step()
    bench.core.add(1, request(prompt(1, 100), deadline_s=5.0))  # there is no room for it on the device
    bench.core.step()
    bench.core.step()
    parked = next(one for one in bench.core.scheduler.sequences if one.deadline)
    assert parked.state is (State.WAITING if when == "here" else State.WAITING_KV)
    assert (parked.host_copy is not None) == (when == "here")
    if how == "cancel":
        bench.core.cancel(1)
    elif how == "deadline":
        clock.now += 10.0
        [last] = [one for one in bench.core.step() if one.done]
        assert last.message.deltas[-1].finish_reason is FinishReason.DEADLINE
    else:
        bench.core.hold(1, True)
        assert parked.state is State.WAITING
        assert parked.host_copy is None
        bench.core.hold(1, False)
    while bench.core.busy:
        bench.core.step()
    bench.settle()


def test_a_store_that_does_not_come_back_is_not_waited_for() -> None:
    clock = Clock()
    store = BadStore(clock)
    bench = Bench(store, clock=clock, room=6)
    assert bench.courier is not None
    bench.courier.lost = lambda errand: isinstance(errand, Fetch)
    bench.core.add(0, request(prompt(1, 100)))
    for _ in range(5):
        bench.core.step()
    assert not bench.runner.plans
    clock.now += 2 * READ_S + 0.001
    seen = [emission.message for _ in range(30) for emission in bench.core.step()]
    assert ids(seen) == ids(Bench().run([request(prompt(1, 100))])[0])
    assert bench.prefixes is not None
    assert bench.prefixes.told(store.stats()).outcomes == {"timeout": 1}
    bench.core.add(1, request(prompt(2, 100)))  # the host's blocks are still out: it does not wait for any
    bench.core.step()
    assert bench.runner.plans[-1].items
    while bench.core.busy:
        bench.core.step()
    bench.courier.lost = lambda errand: False
    bench.settle()


def test_what_comes_when_nobody_waits_any_more_changes_nothing() -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100))])
    bench = Bench(store, clock=clock)
    assert bench.courier is not None
    bench.courier.lost = lambda errand: isinstance(errand, Fetch)
    bench.core.add(0, request(prompt(1, 100), max_tokens=20))
    bench.core.step()
    clock.now += 2 * READ_S + 0.001
    bench.core.step()
    [sequence] = bench.core.scheduler.running
    bench.courier.lost = lambda errand: False
    seen = [emission.message for emission in bench.core.step()]
    assert bench.prefixes is not None
    assert not bench.courier.under_way
    assert sequence.state is State.RUNNING
    assert (sequence.cached_tokens, bench.core.load().external_hit_tokens) == (0, 0)
    seen += [emission.message for _ in range(40) for emission in bench.core.step()]
    assert ids(seen) == ids(Bench().run([request(prompt(1, 100), max_tokens=20)])[0])
    bench.settle()


def test_who_waits_in_the_couriers_queue_waits_no_longer_for_it() -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100))])
    before = store.stats().reads
    bench = Bench(store, clock=clock, turns=lambda: 1)
    bench.core.add(0, request(prompt(1, 100)))
    bench.core.step()
    clock.now += READ_S + 0.001
    bench.core.step()
    bench.core.step()
    assert store.stats().reads == before
    assert bench.prefixes is not None
    assert bench.prefixes.told(store.stats()).outcomes == {"timeout": 1}
    bench.core.cancel(0)
    bench.settle()


def test_what_is_coming_is_not_counted_as_work() -> None:
    """Nor what those wait for who have the same beginning."""
    store = BadStore(Clock())
    Bench(store, value_blocks=2).run([request(prompt(1, 100))])
    bench = Bench(store, value_blocks=2, turns=lambda: 5)
    for key in range(2):
        bench.core.add(key, request(prompt(1, 100)))
    assert bench.core.load().queued_prefill_tokens == 200
    bench.core.step()
    assert [s.state for s in bench.core.scheduler.waiting] == [State.WAITING_KV] * 2
    assert bench.core.load().queued_prefill_tokens == 4 + (100 - 32), "the other one knows of the first value alone"
    bench.courier.lost = lambda errand: True  # type: ignore[union-attr]
    bench.clock.now += 1e12
    bench.core.step()
    assert bench.core.load().queued_prefill_tokens == (100 - 32) + 4, "it computes, and now the other one fetches"
    for key in range(2):
        bench.core.cancel(key)


def test_one_fetches_for_all_who_want_the_same() -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100))])
    bench = Bench(store, clock=clock, turns=lambda: 3)
    found = bench.run([request(prompt(1, 100)) for _ in range(4)] + [request(prompt(1, 80))])
    assert bench.courier is not None
    assert len(bench.courier.fetches) == 1
    assert [cached(messages) for messages in found] == [96, 96, 96, 96, 64]
    assert bench.core.load().external_hit_tokens == 96


@pytest.mark.parametrize("how", ["cancel", "hold", "miss"])
def test_whoever_waits_for_anothers_fetch_does_not_wait_in_vain(how: str) -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100))])
    if how == "miss":
        store.fault = lambda: "miss"
    bench = Bench(store, clock=clock, turns=lambda: 2)
    bench.core.add(0, request(prompt(1, 100)))
    bench.core.add(1, request(prompt(1, 100)))
    bench.core.step()
    assert [one.state for one in bench.core.scheduler.sequences] == [State.WAITING_KV] * 2
    if how == "cancel":
        bench.core.cancel(0)
    elif how == "hold":
        bench.core.hold(0, True)
    seen: list[StreamMessage] = []
    for _ in range(60):
        seen += [emission.message for emission in bench.core.step() if emission.key == 1]
    assert ids(seen) == ids(Bench().run([request(prompt(1, 100))])[0])
    bench.core.cancel(0)
    bench.settle()


def test_copies_that_fail_are_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 100))])
    bench = Bench(store)

    def fails(plan: StepPlan) -> None:
        raise RuntimeError("told to")

    swap, bench.runner.swap = bench.runner.swap, fails  # type: ignore[method-assign]
    [messages] = bench.run([request(prompt(1, 100))])
    assert cached(messages) == 0
    assert ids(messages) == ids(Bench().run([request(prompt(1, 100))])[0])
    assert "were not copied" in caplog.text
    bench.runner.swap = swap  # type: ignore[method-assign]


def test_what_comes_once_is_not_stored_and_what_comes_again_is_once() -> None:
    store = BadStore(Clock())
    bench = Bench(store, after=2)
    saves = lambda: sum(isinstance(errand, Save) for errand in bench.courier.sent)  # type: ignore[union-attr]  # noqa: E731
    bench.run([request(prompt(family, 50)) for family in range(3)])
    assert saves() == store.stats().stored == 0
    bench.run([request(prompt(1, 100))])
    assert saves() == store.stats().stored == 3, "what two prompts begin with"
    for _ in range(5):
        bench.run([request(prompt(1, 50))])
    assert saves() == 3, "the store has it"
    assert not any(isinstance(errand, Fetch) for errand in bench.courier.sent[-2:])  # type: ignore[union-attr]


def test_what_was_not_computed_to_its_end_or_is_faulty_is_not_stored() -> None:
    store = BadStore(Clock())
    bench = Bench(store)
    bench.runner.poisoned = {24}
    bench.core.add(0, request([*prompt(1, 99), 24]))
    bench.core.add(1, request(prompt(2, 100)))
    for _ in range(5):
        bench.core.step()
    bench.core.cancel(1)
    while bench.core.busy:
        bench.core.step()
    bench.settle()
    assert store.stats().stored == 0


def test_pools_and_logprobs_of_a_prompt_take_nothing_that_was_not_computed() -> None:
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 100))])
    bench = Bench(store)
    [messages] = bench.run([request(prompt(1, 100), prompt_logprobs=0, max_tokens=1)])
    assert cached(messages) == 0
    assert request([1], pooling=Pooling.MEAN, n=1).pooling  # has none either: see Sequence.reusable_hashes
    assert not bench.courier.fetches  # type: ignore[union-attr]


def test_flushing_forgets_what_is_on_its_way_too() -> None:
    store = BadStore(Clock())
    bench = Bench(store)
    for tenant in ("one", "two"):
        bench.core.add(
            len(tenant) + (tenant == "two"), request(prompt(1, 50), tenant=tenant, cache_salt=tenant.encode())
        )
    while bench.core.busy:
        bench.core.step()
    bench.core.scheduler.forget("one")
    bench.settle()
    assert {value.owner for value in store._values.values()} == {"two"}
    assert bench.core.scheduler.pool.cached == 3 + bool(bench.core.scheduler.pool.cached > 3)


def test_what_is_slower_is_not_fetched() -> None:
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 100))])
    bench = Bench(store, token_s=1e-12)
    assert cached(bench.run([request(prompt(1, 100))])[0]) == 0
    assert not bench.courier.fetches  # type: ignore[union-attr]
    idle = Bench(store, token_s=None)
    idle.run([request(prompt(1, 100))])
    assert not idle.courier.sent, "nothing is measured yet"  # type: ignore[union-attr]


def test_prospects_follow_what_is_measured() -> None:
    prospects = Prospects(token_s=1e-3, block_s=1e-4)
    assert prospects.favour_fetch(tokens=128, nbytes=2**20, blocks=8)
    for _ in range(40):
        prospects.learn(2**20, 1.0)
    assert prospects.bytes_per_s == pytest.approx(2**20, rel=0.01)
    tried = [prospects.favour_fetch(tokens=128, nbytes=2**20, blocks=8) for _ in range(64)]
    assert sum(tried) == 2, "now and then, to see whether it got faster"
    for _ in range(40):
        prospects.learn(2**20, 1e-3)
    assert prospects.favour_fetch(tokens=128, nbytes=2**20, blocks=8)
    assert not Prospects(1e-3, 1.0).favour_fetch(128, 2**20, 8), "the way to the device counts"


def test_nobody_waits_longer_than_half_of_what_it_saves_nor_than_the_limit() -> None:
    assert patience_s(0.02) == 0.01
    assert patience_s(60.0) == READ_S == 0.05


@settings(max_examples=50, deadline=None)
@given(times=st.lists(st.integers(1, 40), max_size=8), after=st.integers(1, 5))
def test_what_is_worth_storing(times: list[int], after: int) -> None:
    leading = leading_worth(times, after)
    assert all(seen >= after for seen in times[:leading])
    if leading:
        assert leading == len(times) or times[leading] < after
        assert any(seen in {after << i for i in range(8)} for seen in times[:leading])


def test_sightings_are_forgotten_oldest_first() -> None:
    sightings = Sightings(capacity=3)
    assert sightings.saw([b"a", b"b"]) == [1, 1]
    assert sightings.saw([b"a", b"c", b"d"]) == [2, 1, 1]
    assert sightings.saw([b"b", b"a"]) == [1, 3]


def test_errands_name_their_blocks_once() -> None:
    """Whatever comes and goes: a block of the host is free, of a sequence, or of one errand."""
    clock, rng = Clock(), random.Random(4)
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(2, 100)), request(prompt(0, 60))])
    bench = Bench(store, AheadRunner, clock=clock, room=24, turns=lambda: rng.randrange(5))
    assert bench.courier is not None
    assert bench.prefixes is not None
    pool, waiting = bench.prefixes.pool, [request(prompt(i % 3, 40 + 7 * i)) for i in range(12)]
    for step in range(400):
        if waiting and step % 3 == 0:
            bench.core.add(len(waiting), waiting.pop())
        bench.core.step()
        out = [block for _, errand in bench.courier.under_way for block in _blocks(errand)]
        here = [b for one in bench.core.scheduler.sequences if one.host_copy for b in one.host_copy.blocks]
        assert sorted([*pool._free, *pool.left, *out, *here]) == list(range(KEPT, KEPT + 24))
    stats = store.stats()
    assert stats.hits > 0
    assert stats.stored == stats.values > 9, "each value is written once, whoever wants it to be"
    bench.settle()


def _blocks(errand: object) -> list[int]:
    if isinstance(errand, Fetch):
        return [block for value in errand.blocks for block in value]
    return list(errand.blocks) if isinstance(errand, Save | Release) else []


@given(st.lists(st.integers(0, 20), max_size=200), st.integers(1, 8))
def test_what_is_asked_for_most_is_known_however_little_is_kept(asked: list[int], kept: int) -> None:
    popular = Popular(kept)
    for number in asked:
        popular.saw("ann", bytes([number]), 16)
    found = {int(one.prefix, 16): one for one in popular.most(100)}
    assert len(found) <= kept
    for number in set(asked):
        times = asked.count(number)
        if number in found:
            assert found[number].requests - found[number].over <= times <= found[number].requests
        else:
            assert times <= len(asked) / kept
    assert sum(one.requests for one in found.values()) == len(asked)


def test_tenants_prefixes_are_counted_apart_and_forgotten_apart() -> None:
    popular = Popular()
    for tenant, found in (("ann", 0), ("ann", 64), ("bob", 0)):
        popular.saw(tenant, b"key", found)
    popular.fetched("ann", b"key", 32, 64)
    popular.fetched("bob", b"another", 32, 0)
    ann, bob = popular.most(2)
    assert (ann.tenant, ann.requests, ann.found_tokens, ann.fetched_tokens, ann.longest) == ("ann", 2, 64, 32, 96)
    assert (bob.tenant, bob.requests, bob.fetched_tokens) == ("bob", 1, 0)
    popular.forget("ann")
    assert [one.tenant for one in popular.most(2)] == ["bob"]
