"""Preemption to the host's memory: where it pays, what it keeps, and that nobody can tell from the text."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from engine_parts import Clock
from fake_runner import AheadRunner, FakeRunner
from hypothesis import given, settings

from motley.replicas.engine.drafting.ngram_drafter import NgramDrafter
from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.kv_reuse.swap_planner import SwapPlanner, SwapRates
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.sequence import Sequence, SequenceState
from motley.replicas.engine.startup.swap_setup import measure_swap_rates
from motley.replicas.errors import EngineFault
from motley.replicas.execution.step_plan import StepPlan
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.kv.host_blocks import HostBlockPool, HostKvCopy
from motley.replicas.types import BLOCK_TOKENS, Delta, FinishReason, Pooling, Request, SamplingParams

VOCAB = 27
EOS = 26
ALWAYS = SwapRates(1e-9, 1e-9, 1.0)
RUNNERS = [FakeRunner, AheadRunner]


def engine(
    runner: type[FakeRunner] = FakeRunner,
    *,
    blocks: int = 8,
    kept: int = 64,
    budget: int = 32,
    running: int = 8,
    reuse: bool = True,
    drafts: int = 0,
    rates: SwapRates | None = ALWAYS,
) -> EngineCore:
    scheduler = Scheduler(
        BlockPool(blocks, reuse_prefixes=reuse),
        max_batch_tokens=budget,
        max_running=running,
        max_drafts=drafts,
        drafter=NgramDrafter(),
        swap=SwapPlanner(kept, rates),
    )
    limits = ModelLimits(VOCAB, min(128, 16 * blocks), (EOS,))
    return EngineCore(runner(blocks, VOCAB), scheduler, limits, None, Clock())


def request(prompt: list[int], **params: Any) -> Request:
    given = {name: params.pop(name) for name in ("deadline_s", "priority", "pooling") if name in params}
    params = {"temperature": 0.0, "max_tokens": 40, "seed": 5, "ignore_eos": True} | params
    return Request("r", tuple(prompt), SamplingParams(**params), **given)


def run(core: EngineCore, requests: list[Request], *, apart: int = 0) -> list[list[Delta]]:
    """All deltas of each; one comes every `apart` steps. Of neither memory anything is held at the end."""
    seen: list[list[Delta]] = [[] for _ in requests]
    waiting = list(enumerate(requests))
    for step in range(5000):
        while waiting and step >= apart * waiting[0][0]:
            core.add(*waiting.pop(0))
        if not core.busy and not waiting:
            break
        for emission in core.step():
            seen[emission.key].extend(emission.message.deltas)
            if emission.error:
                raise emission.error
        watch(core)
    assert not core.busy
    idle(core)
    return seen


def watch(core: EngineCore) -> None:
    """Blocks of the host are free or of exactly one sequence that waits."""
    core.scheduler.pool.check()
    pool = core.scheduler.swap.pool
    kept = [block for one in core.scheduler.sequences if one.host_copy for block in one.host_copy.blocks]
    assert sorted([*kept, *pool._free]) == list(range(pool.total))
    assert all(one.state is SequenceState.WAITING for one in core.scheduler.sequences if one.host_copy)
    assert core.load().swapped == sum(one.host_copy is not None for one in core.scheduler.sequences)


def idle(core: EngineCore) -> None:
    core.scheduler.pool.check(idle=True)
    core.scheduler.swap.pool.check_idle()


def ids(deltas: list[Delta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == choice for token in delta.token_ids]


def crowd(core: EngineCore, count: int = 4, **params: Any) -> None:
    """More than the pool holds, each with a prompt of its own."""
    for key in range(count):
        core.add(key, request([key] * 30, **params))


def swapped(core: EngineCore) -> list[Sequence]:
    return [one for one in core.scheduler.waiting if one.host_copy is not None]


def step_until_preempted(core: EngineCore) -> tuple[int, int]:
    """How many were swapped then, and how many are computed again."""
    for _ in range(500):
        if core.scheduler.num_preemptions:
            return core.load().preemptions_swapped, core.load().preemptions_recomputed
        core.step()
    raise AssertionError("nobody was preempted")


def step_until_swapped(core: EngineCore) -> Sequence:
    for _ in range(500):
        core.step()
        watch(core)
        if found := swapped(core):
            return found[0]
    raise AssertionError("nobody was swapped")


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 9, "seed": 3},
    {"temperature": 0.8, "n": 2, "logprobs": 2},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"ignore_eos": False, "min_tokens": 9, "temperature": 1.3},
    {"prompt_logprobs": 1, "max_tokens": 12},
    {"stop_token_ids": (3,), "min_tokens": 4},
]


@pytest.mark.slow("40 drawn batches, each answered in little memory and in ample memory")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batch=st.lists(
        st.tuples(
            st.tuples(st.integers(0, 2), st.integers(1, 60)).map(lambda p: [p[0]] * p[1]),
            st.sampled_from(SAMPLINGS),
            st.integers(-1, 1),
        ),
        min_size=2,
        max_size=5,
    ),
    blocks=st.integers(7, 12),
    kept=st.sampled_from([0, 3, 9, 64]),
    budget=st.integers(8, 48),
    apart=st.integers(0, 4),
    reuse=st.booleans(),
    runner=st.sampled_from(RUNNERS),
    drafts=st.sampled_from([0, 4]),
)
def test_nobody_can_tell(
    batch: list[tuple[list[int], dict[str, Any], int]],
    blocks: int,
    kept: int,
    budget: int,
    apart: int,
    reuse: bool,
    runner: type[FakeRunner],
    drafts: int,
) -> None:
    """Greedy and seeded, whatever the memories' sizes: each says what it says in room enough.

    The runner reads every token of a history from its cells: KV that was copied wrongly, or too late, shows.
    """
    requests = [request(prompt, priority=priority, **sampling) for prompt, sampling, priority in batch]
    requests = [replace(one, sampling=replace(one.sampling, max_tokens=min(40, 16 * blocks - 61))) for one in requests]
    core = engine(runner, blocks=blocks, kept=kept, budget=budget, reuse=reuse, drafts=drafts)
    found = run(core, requests, apart=apart)
    roomy = run(engine(blocks=200, rates=None), requests)
    for one, deltas, alone in zip(requests, found, roomy, strict=True):
        for index in range(one.sampling.n):
            assert ids(deltas, index) == ids(alone, index)
            assert _logprobs(deltas, index) == _logprobs(alone, index)
    if not kept:
        assert not core.load().preemptions_swapped


def _logprobs(deltas: list[Delta], index: int) -> list[Any]:
    return [item for delta in deltas if delta.index == index for item in delta.logprobs or ()]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 8}, {"prompt_logprobs": 1}])
def test_what_was_computed_is_not_computed_again(runner: type[FakeRunner], sampling: dict[str, Any]) -> None:
    requests = [request([key] * 30, **sampling) for key in range(4)]
    again, once = engine(runner, reuse=False, kept=0), engine(runner, reuse=False)
    assert run(once, requests) == run(again, requests)
    loads = again.load(), once.load()
    assert loads[0].preemptions_recomputed > 0
    assert loads[0].preemptions_swapped == loads[1].preemptions_recomputed == 0
    assert loads[1].preemptions_swapped == once.scheduler.num_preemptions > 0
    computed = [sum(plan.num_tokens for plan in core._runner.plans) for core in (again, once)]  # type: ignore[attr-defined]
    wanted = sum(len(one.prompt_ids) + 39 for one in requests)
    ahead = loads[1].preemptions_swapped if runner is AheadRunner else 0  # a token on its way had no KV yet
    assert wanted <= computed[1] <= wanted + ahead < computed[0]


def test_of_copies_only_what_the_cache_lost_comes_back() -> None:
    """The first blocks are still found by their hashes: the rest is copied, and everything counts as computed."""
    core = engine(blocks=8)
    pool, plans = core.scheduler.pool, []
    core._runner.swap = lambda plan: (plans.append(plan), FakeRunner.swap(core._runner, plan))  # type: ignore[method-assign]
    core.add(0, request([1] * 40, max_tokens=60))
    core.add(1, request([2] * 70, max_tokens=20))
    victim = step_until_swapped(core)
    assert victim.host_copy is not None
    kept = len(victim.host_copy.blocks)
    assert [len(plan.swap_out) for plan in plans] == [kept]
    core.cancel(0)
    found = pool.cached_prefix(victim.hashes)
    assert 0 < found < kept
    before = len(core._runner.plans)  # type: ignore[attr-defined]
    core.step()
    assert victim.state is SequenceState.RUNNING
    assert [len(plan.swap_in) for plan in plans] == [0, kept - found]
    assert victim.allocation is not None
    assert victim.allocation.prefix_blocks == found
    assert len(core._runner.plans) == before, "it takes part in the step after"  # type: ignore[attr-defined]
    while core.busy:
        core.step()
    idle(core)


def test_blocks_that_others_have_too_are_not_copied_for() -> None:
    """A prompt that a sibling holds need not be computed again: then copying it there and back does not pay."""
    rates = SwapRates(out_s=4.0, in_s=4.0, token_s=1.0)
    assert rates.prefers_copy(blocks=4, shared=0, num_tokens=64)
    assert not rates.prefers_copy(blocks=4, shared=3, num_tokens=64)
    for reuse in (True, False):
        core = engine(rates=rates, reuse=reuse, blocks=10)
        core.add(0, request([1] * 65, n=4, temperature=1.0))
        assert step_until_preempted(core) == (not reuse, reuse)


@pytest.mark.parametrize(
    ("rates", "swaps"),
    [
        (None, False),  # nothing is measured yet
        (SwapRates(9.0, 9.0, 1.0), False),
        (SwapRates(16.0, 0.1, 1.0), False),
        (SwapRates(0.1, 16.0, 1.0), False),
        (SwapRates(14.0, 1.0, 1.0), True),
        (SwapRates(1.0, 14.0, 1.0), True),
    ],
)
def test_the_faster_way_is_taken(rates: SwapRates | None, swaps: bool) -> None:
    """A block of 16 tokens takes 16 s to compute, and 15 s to copy there and back, or more."""
    core = engine(reuse=False, rates=rates)
    core.add(0, request([1] * 60, priority=1))
    core.add(1, request([2] * 12))
    assert step_until_preempted(core) == (swaps, not swaps)
    [victim] = core.scheduler.waiting
    assert victim.num_tokens - 1 == 32


def test_what_was_measured_of_the_way_out_is_not_taken_for_the_way_back() -> None:
    swap = SwapPlanner(4, None)
    told = measure_swap_rates(swap, SimpleNamespace(measure=lambda: (0.001, 0.002)), 0.5)
    assert swap.rates == SwapRates(out_s=0.001, in_s=0.002, token_s=0.5)
    assert "1 ms out and 2 ms in" in told


def test_where_the_host_is_full_it_is_computed_again() -> None:
    core = engine(blocks=12, kept=3, reuse=False)
    requests = [request([key] * 30) for key in range(6)]
    found = run(core, requests)
    load = core.load()
    assert load.preemptions_swapped > 0
    assert load.preemptions_recomputed > 0
    assert found == run(engine(blocks=64), requests)


@pytest.mark.parametrize("runner", RUNNERS)
def test_whoever_lost_its_place_comes_back_before_newer_ones(runner: type[FakeRunner]) -> None:
    core = engine(runner)
    crowd(core, 3)
    victim = step_until_swapped(core)
    core.add(9, request([9]))  # there is room for it at once
    while victim.state is SequenceState.WAITING:
        core.step()
        newer = [one for one in core.scheduler.sequences if one.arrival > victim.arrival]
        assert newer
        assert victim.state is SequenceState.RUNNING or all(one.state is SequenceState.WAITING for one in newer)
    assert victim.num_launched >= 16


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("how", ["cancel", "deadline", "fault"])
def test_whoever_goes_gives_back_what_the_host_has(runner: type[FakeRunner], how: str) -> None:
    core = engine(runner)
    crowd(core, 3, n=2, temperature=1.0)
    core.add(3, request([3] * 30, deadline_s=10.0, n=2, temperature=1.0))
    for _ in range(500):
        core.step()
        watch(core)
        if mine := [one for one in swapped(core) if one.deadline is not None]:
            break
    job = core._job_of[mine[0].id]
    if how == "cancel":
        core.cancel(job.key)
    elif how == "deadline":
        core._clock.now = 11.0  # type: ignore[attr-defined]
        [last] = [one for one in core.step() if one.done]
        assert {delta.finish_reason for delta in last.message.deltas} == {FinishReason.DEADLINE}
    else:
        core._fault(mine[0], "broken")
    watch(core)
    assert all(one.deadline is None for one in core.scheduler.sequences)
    while core.busy:
        core.step()
        watch(core)
    idle(core)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_slow_reader_keeps_nothing_of_the_host(runner: type[FakeRunner]) -> None:
    core = engine(runner, reuse=False)
    for key in range(4):
        core.add(key, request([key] * 30))
    held = set[int]()
    for _ in range(2000):
        if not core.busy:
            break
        core.step()
        for sequence in list(core.scheduler.waiting):
            if sequence.host_copy is not None and not held:
                held.add(core._job_of[sequence.id].key)
                core.hold(next(iter(held)), True)
                assert sequence.host_copy is None
        if core.waits_for_readers or len(core._jobs) == len(held):
            for key in held:
                core.hold(key, False)
    assert held
    idle(core)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_sequence_that_is_on_its_way_back_may_go_or_wait(runner: type[FakeRunner]) -> None:
    """Between the step that copies and the one that computes: cancelled, or its reader is behind."""
    requests = [request([key] * 30) for key in range(4)]
    expected = [ids(deltas) for deltas in run(engine(blocks=64), requests)]
    for how in ("cancel", "hold"):
        core = engine(runner, reuse=False)
        seen: dict[int, list[int]] = {key: [] for key in range(4)}
        for key, one in enumerate(requests):
            core.add(key, one)
        hit: list[int] = []
        for _ in range(2000):
            if not core.busy:
                break
            for emission in core.step():
                seen[emission.key] += ids(list(emission.message.deltas))
            watch(core)
            for sequence, _, _ in list(core.scheduler.swap._coming):
                key = core._job_of[sequence.id].key
                hit.append(key)
                if how == "cancel":
                    core.cancel(key)
                else:
                    core.hold(key, True)
                    assert sequence.allocation is None
                    core.hold(key, False)
        assert hit
        for key, tokens in seen.items():
            assert tokens == expected[key][: len(tokens)]
            assert len(tokens) == 40 or (how == "cancel" and key in hit)
        idle(core)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("fails", [{"out"}, {"in"}, {"out", "in"}])
def test_what_could_not_be_copied_is_computed_again(runner: type[FakeRunner], fails: set[str]) -> None:
    requests = [request([key] * 30, temperature=1.0) for key in range(4)]
    core, wrong = engine(runner, reuse=False), list[StepPlan]()
    swap, failed = core._runner.swap, []  # type: ignore[attr-defined]
    saved: set[int] = set()

    def fail(plan: StepPlan) -> None:
        if not saved.issuperset(block for _, block in plan.swap_in):
            wrong.append(plan)
        if ("out" if plan.swap_out else "in") in fails:
            failed.append(plan)
            raise RuntimeError("out of memory")
        saved.update(block for _, block in plan.swap_out)
        swap(plan)

    core._runner.swap = fail  # type: ignore[attr-defined]
    assert run(core, requests) == run(engine(blocks=64), requests)
    assert failed
    assert not wrong, "nothing comes back that was not kept"
    if "out" in fails:
        assert core.load().preemptions_swapped == 0
        assert core.load().preemptions_recomputed > 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_step_that_fails_beside_copies_changes_nothing(runner: type[FakeRunner]) -> None:
    requests = [request([key] * 30, temperature=1.0) for key in range(5)]
    expected = run(engine(blocks=64), requests)
    core = engine(runner)
    swap, failures = core._runner.swap, []  # type: ignore[attr-defined]

    def then_fail(plan: StepPlan) -> None:
        swap(plan)
        core._runner.fail_next = RuntimeError("out of memory")  # type: ignore[attr-defined]
        failures.append(plan)

    core._runner.swap = then_fail  # type: ignore[attr-defined]
    try:
        assert run(core, requests) == expected
    except EngineFault:  # of a step of one sequence: it is not run once more
        assert runner is FakeRunner
    assert failures


def test_siblings_wait_until_their_leaders_prompt_is_back() -> None:
    """It was swapped out before they had room: they find its prompt in the cache, and compute none of it."""
    core = engine(blocks=7, running=2)
    core.add(0, request([1] * 30, priority=1, max_tokens=60))
    core.add(1, request([2] * 50, n=3, temperature=1.0, max_tokens=20))
    victim = step_until_swapped(core)
    assert (victim.request.sampling.n, victim.choice) == (3, 0)
    while core.busy:
        core.step()
        watch(core)
    idle(core)
    plans: list[StepPlan] = core._runner.plans  # type: ignore[attr-defined]
    for sibling in range(victim.id + 1, victim.id + 3):
        assert min(item.start for plan in plans for item in plan.items if item.sequence_id == sibling) == 48


def test_pooled_prompts_are_begun_anew() -> None:
    core = engine(blocks=5, budget=2, running=2, reuse=False)
    core.add(0, request([1] * 30, priority=1))
    core.add(1, request([2] * 33, pooling=Pooling.MEAN, max_tokens=1))
    assert step_until_preempted(core) == (0, 1)


def test_what_is_kept_is_not_told_as_work() -> None:
    """A router sends less to those who have much to compute: what the host has need not be computed."""
    core = engine(reuse=False)
    crowd(core, 2, max_tokens=60)
    victim = step_until_swapped(core)
    assert core.load().queued_prefill_tokens == 0
    assert victim.remaining > 16
    core.scheduler.swap.drop(victim)
    assert core.load().queued_prefill_tokens == victim.remaining


@settings(max_examples=200, deadline=None, derandomize=True)
@given(total=st.integers(0, 12), steps=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 11)), max_size=40))
def test_every_block_of_the_host_is_free_or_in_one_copy(total: int, steps: list[tuple[int, int]]) -> None:
    pool, held = HostBlockPool(total), list[HostKvCopy]()
    for tokens, closed in steps:
        before = pool.available
        copy = pool.open(tokens)
        wanted = -(-tokens // BLOCK_TOKENS)
        assert (copy is None) == (wanted > before)
        if copy is not None:
            assert len(copy.blocks) == wanted
            held.append(copy)
        if closed < len(held):
            held.pop(closed).close()
        assert sorted([*pool._free, *(block for copy in held for block in copy.blocks)]) == list(range(total))
    if any(copy.blocks for copy in held):
        with pytest.raises(AssertionError, match="still on the host"):
            pool.check_idle()
    for copy in held:
        copy.close()
        copy.close()
    pool.check_idle()
