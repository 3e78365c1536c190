"""Prefixes from a store: nobody can tell, whatever the store does, and nothing is left anywhere."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from engine_parts import Clock
from fake_prefixes import FAULTS, BadStore
from fake_runner import AheadRunner, FakeRunner
from hypothesis import given, settings
from prefix_bench import KEPT, RUNNERS, Bench, cached, ids, prompt, request

from motley.replicas.engine.sequence import SequenceState
from motley.replicas.errors import EngineLost
from motley.replicas.execution.step_plan import StepPlan
from motley.replicas.kv.store.store_ops import FetchOp, ReleaseOp, SaveOp
from motley.replicas.types import StreamMessage

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 9, "seed": 3},
    {"temperature": 0.8, "n": 2, "logprobs": 2},
    {"prompt_logprobs": 1, "max_tokens": 3},
    {"frequency_penalty": 0.4, "max_tokens": 12},
]


@pytest.mark.slow("40 drawn batches, each answered with the store and without")
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
    assert second.prefixes.stats(store.stats()).outcomes == {"hit": 1}


def test_a_prompt_that_values_fill_to_its_end_leaves_its_last_token() -> None:
    store = BadStore(Clock())
    Bench(store, value_blocks=2).run([request(prompt(1, 64))])
    second = Bench(store, value_blocks=2)
    [messages] = second.run([request(prompt(1, 64))])
    assert cached(messages) == 48
    assert ids(messages) == ids(Bench().run([request(prompt(1, 64))])[0])


def test_what_is_known_in_part_is_taken_in_part() -> None:
    """Takes the store's leading values and the device's own, in whatever order they were lost."""
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 100))])
    whole = sorted(store._values)
    third = Bench(store, after=99)
    third.run([request(prompt(1, 40))])  # two blocks of it are on the device
    lost = third.store_worker.fetches[0].keys[1]  # type: ignore[union-attr]
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
    assert parked.state is SequenceState.WAITING_KV
    bench.core.scheduler.pool.forget_prefixes()
    seen = [emission.message for _ in range(30) for emission in bench.core.step()]
    assert cached(seen) == 0
    assert ids(seen) == ids(Bench().run([request(prompt(1, 100))])[0])
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


def test_copies_that_fail_as_the_engine_is_lost_end_it() -> None:
    """Some processes of a divided model may have copied, and others not: nothing can be computed again."""
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 100))])
    bench = Bench(store)

    def lost(plan: StepPlan) -> None:
        raise EngineLost("told to")

    bench.runner.swap = lost  # type: ignore[method-assign]
    with pytest.raises(EngineLost):
        bench.run([request(prompt(1, 100))])


def test_store_ops_name_their_blocks_once() -> None:
    """Whatever comes and goes: a block of the host is free, of a sequence, or of one errand."""
    clock, rng = Clock(), random.Random(4)
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(2, 100)), request(prompt(0, 60))])
    bench = Bench(store, AheadRunner, clock=clock, room=24, turns=lambda: rng.randrange(5))
    assert bench.store_worker is not None
    assert bench.prefixes is not None
    pool, waiting = bench.prefixes.pool, [request(prompt(i % 3, 40 + 7 * i)) for i in range(12)]
    for step in range(400):
        if waiting and step % 3 == 0:
            bench.core.add(len(waiting), waiting.pop())
        bench.core.step()
        out = [block for _, store_op in bench.store_worker.under_way for block in _blocks(store_op)]
        here = [b for one in bench.core.scheduler.sequences if one.host_copy for b in one.host_copy.blocks]
        assert sorted([*pool._free, *pool.left, *out, *here]) == list(range(KEPT, KEPT + 24))
    stats = store.stats()
    assert stats.hits > 0
    assert stats.stored == stats.values > 9, "each value is written once, whoever wants it to be"
    bench.settle()


def _blocks(store_op: object) -> list[int]:
    if isinstance(store_op, FetchOp):
        return [block for value in store_op.blocks for block in value]
    return list(store_op.blocks) if isinstance(store_op, SaveOp | ReleaseOp) else []
