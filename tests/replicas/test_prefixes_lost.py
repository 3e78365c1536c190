"""A store that is away, or has lost what it had: no request pays for it, and what is missing is stored again."""

from __future__ import annotations

import pytest
from engine_parts import Clock
from fake_prefixes import BadStore
from prefix_bench import Bench, cached, prompt, request

from motley.replicas.kv.store.fetch_cost import lookup_wait_s
from motley.replicas.kv.store.store_ops import SaveOp


def asked_anew(bench: Bench) -> int | None:
    """By a replica whose own KV has nothing of it."""
    bench.core.scheduler.pool.forget_prefixes()
    [messages] = bench.run([request(prompt(1, 70))])
    return cached(messages)


def saves(bench: Bench) -> int:
    assert bench.store_worker is not None
    return sum(isinstance(store_op, SaveOp) for store_op in bench.store_worker.sent)


@pytest.mark.parametrize("times", [2, 3, 5, 12])
def test_what_the_store_has_lost_is_stored_by_the_next_who_asks(times: int) -> None:
    """However often it was asked for before."""
    store = BadStore(Clock())
    bench = Bench(store, after=2)
    for _ in range(times):
        asked_anew(bench)
    assert saves(bench) == 4
    store.forget(None)  # such as a redis-server that was started again
    assert asked_anew(bench) == 0
    assert saves(bench) == 8
    assert asked_anew(bench) == 64
    assert saves(bench) == 8


def test_what_was_asked_for_once_is_not_stored_for_being_missed() -> None:
    bench = Bench(BadStore(Clock()), after=2)
    asked_anew(bench)
    assert bench.store_worker is not None
    assert bench.store_worker.fetches
    assert saves(bench) == 0


def test_a_store_that_is_away_is_not_asked() -> None:
    store = BadStore(Clock())
    bench = Bench(store, after=2)
    assert bench.store_worker is not None
    store.gone = True
    for _ in range(4):
        assert asked_anew(bench) == 0
    assert not bench.store_worker.fetches
    assert not saves(bench), "nor is anything sealed for it"
    store.gone = False
    assert [asked_anew(bench) for _ in range(2)] == [0, 64]


def test_a_store_that_cannot_tell_what_it_has_is_given_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BadStore(Clock())
    bench = Bench(store)
    monkeypatch.setattr(store, "count_stored", lambda keys, deadline: None)
    asked_anew(bench)
    assert not saves(bench)
    monkeypatch.undo()
    asked_anew(bench)
    assert saves(bench) == 4


def test_what_is_missed_at_once_is_computed_beside_others() -> None:
    """Not after a step of theirs, that it could have been in."""
    bench = Bench(BadStore(Clock()))
    bench.core.add(0, request(prompt(2, 10), max_tokens=30))
    bench.core.step()
    bench.core.add(1, request(prompt(1, 30)))
    bench.core.step()
    assert [len(item.token_ids) for item in bench.runner.plans[-1].items] == [1, 30]
    assert bench.store_worker is not None
    assert len(bench.store_worker.fetches) == 1
    while bench.core.busy:
        bench.core.step()
    bench.settle()


def test_others_wait_for_that_no_longer_than_it_matters() -> None:
    assert lookup_wait_s(10.0) == 0.002
    assert lookup_wait_s(0.05) == pytest.approx(0.0005)
