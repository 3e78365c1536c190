"""Sequences that wait for a store: who goes on meanwhile, who leaves, and for how long."""

from __future__ import annotations

import pytest
from engine_parts import Clock
from fake_prefixes import BadStore
from prefix_bench import Bench, cached, ids, prompt, request

from motley.replicas.engine.sequence import SequenceState
from motley.replicas.kv.store.fetch_cost import MAX_READ_S
from motley.replicas.kv.store.store_ops import FetchOp
from motley.replicas.types import FinishReason, StreamMessage


def test_others_go_on_while_one_waits() -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100))])
    bench = Bench(store, clock=clock, turns=lambda: 5)
    bench.core.add(0, request(prompt(1, 100)))
    bench.core.add(1, request(prompt(2, 5)))
    bench.core.step()
    first, second = sorted(bench.core.scheduler.sequences, key=lambda one: one.id)
    assert (first.state, second.state) == (SequenceState.WAITING_KV, SequenceState.RUNNING)
    for _ in range(4):
        clock.now += 1e-4
        bench.core.step()
    assert len(second.output_ids) >= 4
    assert first.state is SequenceState.WAITING_KV
    seen = [emission for _ in range(40) for emission in bench.core.step()]
    assert {one.key: one.message.timings.fetch_s for one in seen if one.message.timings} == {0: pytest.approx(4e-4)}
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
    assert parked.state is (SequenceState.WAITING if when == "here" else SequenceState.WAITING_KV)
    assert (parked.host_copy is not None) == (when == "here")
    if how == "cancel":
        bench.core.cancel(1)
    elif how == "deadline":
        clock.now += 10.0
        [last] = [one for one in bench.core.step() if one.done]
        assert last.message.deltas[-1].finish_reason is FinishReason.DEADLINE
    else:
        bench.core.hold(1, True)
        assert parked.state is SequenceState.WAITING
        assert parked.host_copy is None
        bench.core.hold(1, False)
    while bench.core.busy:
        bench.core.step()
    bench.settle()


def test_a_store_that_does_not_come_back_is_not_waited_for() -> None:
    clock = Clock()
    store = BadStore(clock)
    bench = Bench(store, clock=clock, room=6)
    assert bench.store_worker is not None
    bench.store_worker.lost = lambda store_op: isinstance(store_op, FetchOp)
    bench.core.add(0, request(prompt(1, 100)))
    for _ in range(5):
        bench.core.step()
    assert not bench.runner.plans
    clock.now += 2 * MAX_READ_S + 0.001
    seen = [emission.message for _ in range(30) for emission in bench.core.step()]
    assert ids(seen) == ids(Bench().run([request(prompt(1, 100))])[0])
    assert bench.prefixes is not None
    assert bench.prefixes.stats(store.stats()).outcomes == {"timeout": 1}
    bench.core.add(1, request(prompt(2, 100)))  # the host's blocks are still out: it does not wait for any
    bench.core.step()
    assert bench.runner.plans[-1].items
    while bench.core.busy:
        bench.core.step()
    bench.store_worker.lost = lambda store_op: False
    bench.settle()


def test_what_comes_when_nobody_waits_any_more_changes_nothing() -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100))])
    bench = Bench(store, clock=clock)
    assert bench.store_worker is not None
    bench.store_worker.lost = lambda store_op: isinstance(store_op, FetchOp)
    bench.core.add(0, request(prompt(1, 100), max_tokens=20))
    bench.core.step()
    clock.now += 2 * MAX_READ_S + 0.001
    bench.core.step()
    [sequence] = bench.core.scheduler.running
    bench.store_worker.lost = lambda store_op: False
    seen = [emission.message for emission in bench.core.step()]
    assert bench.prefixes is not None
    assert not bench.store_worker.under_way
    assert sequence.state is SequenceState.RUNNING
    assert (sequence.cached_tokens, bench.core.load().external_hit_tokens) == (0, 0)
    seen += [emission.message for _ in range(40) for emission in bench.core.step()]
    assert ids(seen) == ids(Bench().run([request(prompt(1, 100), max_tokens=20)])[0])
    assert seen[0].timings is not None
    assert seen[0].timings.fetch_s == clock.now
    bench.settle()


def test_who_waits_in_the_couriers_queue_waits_no_longer_for_it() -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100))])
    before = store.stats().reads
    bench = Bench(store, clock=clock, turns=lambda: 1)
    bench.core.add(0, request(prompt(1, 100)))
    bench.core.step()
    clock.now += MAX_READ_S + 0.001
    bench.core.step()
    bench.core.step()
    assert store.stats().reads == before
    assert bench.prefixes is not None
    assert bench.prefixes.stats(store.stats()).outcomes == {"timeout": 1}
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
    assert [s.state for s in bench.core.scheduler.waiting] == [SequenceState.WAITING_KV] * 2
    assert bench.core.load().queued_prefill_tokens == 4 + (100 - 32), "the other one knows of the first value alone"
    bench.store_worker.lost = lambda store_op: True  # type: ignore[union-attr]
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
    assert bench.store_worker is not None
    assert len(bench.store_worker.fetches) == 1
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
    assert [one.state for one in bench.core.scheduler.sequences] == [SequenceState.WAITING_KV] * 2
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
