"""Reports of replicas about prefixes: what the store has of a prompt, and which are requested most."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from engine_parts import Clock
from fake_prefixes import BadStore
from fake_runner import FakeRunner
from hypothesis import given
from prefix_bench import RUNNERS, Bench, prompt, request, told

from motley.replicas.kv.prefix.known_values import KnownValues
from motley.replicas.kv.prefix.popular_prefixes import PrefixPopularity
from motley.replicas.kv.store.store_keys import StoreKeys
from motley.replicas.kv.store.store_ops import SaveOp
from motley.replicas.types import PromptStoreStatus


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_the_store_has_of_a_prompt_is_told_once_it_is_known(runner: type[FakeRunner]) -> None:
    """The first message has it, and the last one if more is known by then: never of the output."""
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
    assert other.prefixes.cost_model is not None
    assert messages[0].stored == PromptStoreStatus(96, None, other.prefixes.fetch_s)
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
    while not any(isinstance(store_op, SaveOp) for store_op in bench.store_worker.sent):  # type: ignore[union-attr]
        bench.core.step()
    bench.core.scheduler.forget(None)
    while bench.core.busy:
        bench.core.step()
    bench.settle()
    assert bench.prefixes is not None
    assert not bench.prefixes._seen_values._seen


def test_what_is_known_of_a_store_is_believed_for_a_while() -> None:
    clock = Clock()
    seen = KnownValues(clock, capacity=4)
    seen.add([b"a", b"b", b"c"])
    assert seen.leading([b"a", b"b", b"x", b"c"]) == 2
    seen.add([b"d", b"e"])
    assert seen.leading([b"a", b"b", b"c"]) == 2, "a prefix is forgotten from its end"
    seen.discard([b"b", b"x"])
    assert seen.leading([b"a", b"b"]) == 1
    clock.now += 50
    seen.add([b"d"])
    clock.now += 50
    assert [seen.leading([key]) for key in (b"a", b"d")] == [0, 1]
    seen.forget()
    assert seen.leading([b"d"]) == 0


def test_the_name_of_what_is_shared_is_that_of_its_secret_and_its_identity() -> None:
    names = [StoreKeys(secret, identity).name for secret in (b"a" * 32, b"b" * 32) for identity in (b"1", b"2")]
    assert len(set(names)) == 4
    assert StoreKeys(b"a" * 32, b"1").name == names[0]
    assert Bench(None).core.scheduler.prefixes.shares == ""


@given(st.lists(st.integers(0, 20), max_size=200), st.integers(1, 8))
def test_what_is_asked_for_most_is_known_however_little_is_kept(asked: list[int], kept: int) -> None:
    popular = PrefixPopularity(kept)
    for number in asked:
        popular.saw("ann", bytes([number]), 16)
    found = {int(one.prefix, 16): one for one in popular.top(100)}
    assert len(found) <= kept
    for number in set(asked):
        times = asked.count(number)
        if number in found:
            assert found[number].requests - found[number].over <= times <= found[number].requests
        else:
            assert times <= len(asked) / kept
    assert sum(one.requests for one in found.values()) == len(asked)


def test_tenants_prefixes_are_counted_apart_and_forgotten_apart() -> None:
    popular = PrefixPopularity()
    for tenant, found in (("ann", 0), ("ann", 64), ("bob", 0)):
        popular.saw(tenant, b"key", found)
    popular.fetched("ann", b"key", 32, 64)
    popular.fetched("bob", b"another", 32, 0)
    ann, bob = popular.top(2)
    assert (ann.tenant, ann.requests, ann.found_tokens, ann.fetched_tokens, ann.longest) == ("ann", 2, 64, 32, 96)
    assert (bob.tenant, bob.requests, bob.fetched_tokens) == ("bob", 1, 0)
    popular.forget("ann")
    assert [one.tenant for one in popular.top(2)] == ["bob"]
