"""Decisions on what is worth fetching, and what is worth storing."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from engine_parts import Clock
from fake_prefixes import BadStore
from hypothesis import given, settings
from prefix_bench import Bench, cached, prompt, request

from motley.replicas.kv.store.fetch_cost import (
    MAX_READ_S,
    ChunkCounter,
    FetchCostModel,
    fetch_timeout_s,
    leading_worth_storing,
)
from motley.replicas.kv.store.store_ops import FetchOp, SaveOp
from motley.replicas.types import Pooling


def test_what_comes_once_is_not_stored_and_what_comes_again_is_once() -> None:
    store = BadStore(Clock())
    bench = Bench(store, after=2)
    saves = lambda: sum(isinstance(store_op, SaveOp) for store_op in bench.store_worker.sent)  # type: ignore[union-attr]  # noqa: E731
    bench.run([request(prompt(family, 50)) for family in range(3)])
    assert saves() == store.stats().stored == 0
    bench.run([request(prompt(1, 100))])
    assert saves() == store.stats().stored == 3, "what two prompts begin with"
    for _ in range(5):
        bench.run([request(prompt(1, 50))])
    assert saves() == 3, "the store has it"
    assert not any(isinstance(store_op, FetchOp) for store_op in bench.store_worker.sent[-2:])  # type: ignore[union-attr]


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
    assert not bench.store_worker.fetches  # type: ignore[union-attr]


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
    assert not bench.store_worker.fetches  # type: ignore[union-attr]
    idle = Bench(store, token_s=None)
    idle.run([request(prompt(1, 100))])
    assert not idle.store_worker.sent, "nothing is measured yet"  # type: ignore[union-attr]


def test_prospects_follow_what_is_measured() -> None:
    prospects = FetchCostModel(token_s=1e-3, block_s=1e-4)
    assert prospects.prefers_fetch(tokens=128, nbytes=2**20, blocks=8)
    for _ in range(40):
        prospects.learn(2**20, 1.0)
    assert prospects.bytes_per_s == pytest.approx(2**20, rel=0.01)
    tried = [prospects.prefers_fetch(tokens=128, nbytes=2**20, blocks=8) for _ in range(64)]
    assert sum(tried) == 2, "now and then, to see whether it got faster"
    for _ in range(40):
        prospects.learn(2**20, 1e-3)
    assert prospects.prefers_fetch(tokens=128, nbytes=2**20, blocks=8)
    assert not FetchCostModel(1e-3, 1.0).prefers_fetch(128, 2**20, 8), "the way to the device counts"


def test_nobody_waits_longer_than_half_of_what_it_saves_nor_than_the_limit() -> None:
    assert fetch_timeout_s(0.02) == 0.01
    assert fetch_timeout_s(60.0) == MAX_READ_S == 0.05


@settings(max_examples=50, deadline=None)
@given(times=st.lists(st.integers(1, 40), max_size=8), after=st.integers(1, 5))
def test_what_is_worth_storing(times: list[int], after: int) -> None:
    leading = leading_worth_storing(times, after)
    assert all(seen >= after for seen in times[:leading])
    if leading:
        assert leading == len(times) or times[leading] < after
        assert any(seen in {after << i for i in range(8)} for seen in times[:leading])


def test_sightings_are_forgotten_oldest_first() -> None:
    sightings = ChunkCounter(capacity=3)
    assert sightings.saw([b"a", b"b"]) == [1, 1]
    assert sightings.saw([b"a", b"c", b"d"]) == [2, 1, 1]
    assert sightings.saw([b"b", b"a"]) == [1, 3]
