from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings

from motley.replicas.engine.scheduler import MAX_DISPLACEMENTS, Scheduler
from motley.replicas.engine.sequence import Sequence, SequenceState
from motley.replicas.execution.step_plan import StepPlan
from motley.replicas.kv.blocks import BlockPool, blocks_for
from motley.replicas.types import BLOCK_TOKENS, Request, SamplingParams

BLOCKS = 10


def make(number: int, prompt: list[int], output: int, priority: int = 0, leader: Sequence | None = None) -> Sequence:
    request = Request(f"r{number}", tuple(prompt), SamplingParams(seed=0, max_tokens=output), priority=priority)
    return Sequence(number, request, 0, arrival=number, limit=len(prompt) + output, eos_ids=(), leader=leader)


def scheduler(budget: int = 32, running: int = 4, blocks: int = BLOCKS) -> Scheduler:
    return Scheduler(BlockPool(blocks), max_batch_tokens=budget, max_running=running)


def step(scheduler: Scheduler) -> StepPlan:
    """Plan, pretend to run, commit; each sampled token is 7."""
    plan = scheduler.plan()
    allocations = scheduler.launched(plan)
    scheduler.landed(plan)
    scheduler.commit(zip(plan.items, allocations, strict=True))
    for item in plan.items:
        sequence = scheduler.sequence(item.sequence_id)
        assert sequence.num_computed <= sequence.num_tokens
        if item.sample is not None:
            sequence.output_ids.append(7)
            if sequence.finish_after_last():
                scheduler.remove(sequence)
    return plan


job = st.tuples(
    st.integers(1, (BLOCKS - 1) * BLOCK_TOKENS),  # prompt length
    st.integers(1, BLOCK_TOKENS),  # output length
    st.integers(0, 2),  # prompt family: equal families share prefixes
    st.integers(-1, 1),  # priority
    st.integers(0, 6),  # arrives at this step
    st.sampled_from([None, 2, 9]),  # cancelled after so many steps
)


@settings(max_examples=150, deadline=None)
@given(jobs=st.lists(job, min_size=1, max_size=12), budget=st.integers(4, 64), running=st.integers(1, 4))
def test_every_sequence_ends_within_the_limits(jobs: list[tuple], budget: int, running: int) -> None:
    under_test = scheduler(budget, running)
    sequences: list[Sequence] = []
    for now in range(10_000):
        for number, (length, output, family, priority, arrives, _) in enumerate(jobs):
            if arrives == now:
                sequences.append(make(number, [family] * length, output, priority))
                under_test.add(sequences[-1])
        for sequence in sequences:
            _, _, _, _, arrives, cancelled = jobs[sequence.id]
            if cancelled is not None and now == arrives + cancelled and sequence.state is not SequenceState.FINISHED:
                under_test.remove(sequence)
        if now > 6 and not under_test:
            break
        plan = step(under_test)
        assert plan.items or not under_test, "nothing planned though somebody waits"
        assert plan.num_tokens <= budget
        assert len(plan.items) <= running
        assert len({item.sequence_id for item in plan.items}) == len(plan.items)
        lengths = [len(item.token_ids) for item in plan.items]
        assert lengths == sorted(lengths, key=lambda n: n > 1)
        under_test.pool.check()
    assert len(sequences) == len(jobs)
    assert all(sequence.state is SequenceState.FINISHED for sequence in sequences)
    under_test.pool.check(idle=True)


def test_a_long_prompt_is_chunked_beside_decodes() -> None:
    under_test = scheduler(budget=16)
    under_test.add(make(0, [1], 20))
    step(under_test)
    under_test.add(make(1, [2] * 40, 2))
    chunks = [[len(item.token_ids) for item in step(under_test).items] for _ in range(4)]
    assert chunks == [[1, 15], [1, 15], [1, 10], [1, 1]]


def test_a_second_equal_prompt_computes_only_its_last_block() -> None:
    under_test = scheduler(budget=64)
    under_test.add(make(0, [5] * 48, 1))
    step(under_test)
    under_test.add(twin := make(1, [5] * 48, 1))
    plan = step(under_test)
    assert [item.start for item in plan.items] == [32]
    assert twin.cached_tokens == 32


def test_a_prompt_is_counted_as_looked_for_once_and_only_where_it_may_be_found() -> None:
    under_test = scheduler(budget=64)
    leader = make(0, [5] * 33, 1)
    under_test.add(leader)
    under_test.add(make(1, [5] * 33, 1, leader=leader))
    while under_test.load().running or under_test.load().waiting:
        step(under_test)
    assert under_test.load().queried_tokens == 33, "choices of one prompt are one"
    under_test.add(alone := replace(make(2, [5] * 33, 1), wants_prompt_logprobs=True))
    step(under_test)
    assert alone.cached_tokens == 0
    assert under_test.load().queried_tokens == 33, "the logits of all of its prompt are needed"


def test_siblings_wait_for_their_leader_and_then_hit() -> None:
    under_test = scheduler(budget=16)
    leader = make(0, [5] * 33, 4)
    under_test.add(leader)
    under_test.add(make(1, [5] * 33, 4, leader=leader))
    plans = [step(under_test) for _ in range(3)]
    assert [[(i.sequence_id, i.start) for i in plan.items] for plan in plans] == [
        [(0, 0)],
        [(0, 16)],
        [(0, 32), (1, 32)],
    ]


def test_siblings_do_not_wait_for_a_leader_that_is_gone() -> None:
    under_test = scheduler(budget=16)
    leader = make(0, [5] * 33, 4)
    under_test.add(leader)
    under_test.add(make(1, [5] * 33, 4, leader=leader))
    step(under_test)
    under_test.remove(leader)
    assert [item.sequence_id for item in step(under_test).items] == [1]


def test_preemption_takes_the_lowest_rank_and_it_comes_back() -> None:
    under_test = scheduler(budget=64, blocks=4)
    urgent, patient = make(0, [1] * 16, 40, priority=1), make(1, [2] * 16, 40)
    under_test.add(urgent)
    under_test.add(patient)
    while patient.state is not SequenceState.WAITING or not patient.output_ids:
        step(under_test)
    assert under_test.num_preemptions == 1
    assert urgent.state is SequenceState.RUNNING
    while under_test:
        step(under_test)
    assert len(urgent.output_ids) == len(patient.output_ids) == 40


def test_priority_goes_before_arrival() -> None:
    under_test = scheduler(running=1)
    under_test.add(make(0, [1] * 4, 1))
    under_test.add(make(1, [2] * 4, 1, priority=5))
    assert [item.sequence_id for item in step(under_test).items] == [1]


def test_load_counts_tokens_not_requests() -> None:
    under_test = scheduler(budget=16)
    under_test.add(make(0, [1] * 100, 4))
    under_test.add(make(1, [2] * 10, 4))
    step(under_test)
    load = under_test.load()
    assert (load.running, load.waiting, load.queued_prefill_tokens) == (1, 1, 84 + 10)
    assert load.kv_blocks_free == BLOCKS - 1


def test_a_step_that_lands_after_its_sequence_lost_its_place_publishes_nothing_of_the_new_one() -> None:
    """Held and let go between launch and result: the blocks are others, and less of them is being computed."""
    under_test = scheduler(budget=8)
    sequence = make(0, [5] * 33, 4)
    under_test.add(sequence)
    step(under_test)
    plan = under_test.plan()
    allocations = under_test.launched(plan)
    under_test.hold(sequence, True)
    under_test.hold(sequence, False)
    again = under_test.plan()
    under_test.launched(again)
    assert [(item.start, item.end) for item in (*plan.items, *again.items)] == [(8, 16), (0, 8)]
    under_test.landed(plan)
    under_test.commit(zip(plan.items, allocations, strict=True))
    assert sequence.num_computed == 0
    assert not under_test.pool.cached_prefix(sequence.reusable_hashes())


def running(scheduler: Scheduler) -> list[int]:
    return sorted(sequence.id for sequence in scheduler.running)


def test_a_higher_priority_takes_the_place_of_the_least_important_that_runs() -> None:
    under_test = scheduler(running=2, budget=64, blocks=30)
    for number, priority in enumerate((0, 1, 1)):
        under_test.add(make(number, [number] * 20, 30, priority))
    step(under_test)
    assert running(under_test) == [1, 2]
    under_test.add(make(3, [3] * 20, 30))
    for _ in range(3):
        step(under_test)
    assert running(under_test) == [1, 2], "an equal priority waits for its turn"
    under_test.add(make(4, [4] * 20, 3, priority=5))
    assert 4 in [item.sequence_id for item in step(under_test).items], "in the very next step"
    assert running(under_test) == [1, 4], "of two that are alike, who came last goes"
    while 4 in running(under_test):
        step(under_test)
    step(under_test)
    assert running(under_test) == [1, 2], "and comes back before those below it"


def test_a_higher_priority_takes_kv_that_lower_ones_have() -> None:
    under_test = scheduler(running=4, budget=256, blocks=8)
    for number in range(3):
        under_test.add(make(number, [number] * 32, 8))
    step(under_test)
    under_test.add(make(3, [3] * 64, 8, priority=1))
    assert 3 in [item.sequence_id for item in step(under_test).items]
    assert running(under_test) == [0, 3], "no more go than it needs"


def test_nobody_goes_where_that_would_not_make_room_enough() -> None:
    under_test = scheduler(running=3, budget=256, blocks=8)
    under_test.add(make(0, [0] * 32, 8, priority=2))
    under_test.add(make(1, [1] * 32, 8))
    step(under_test)
    under_test.add(make(2, [2] * 96, 8, priority=1))
    step(under_test)
    assert running(under_test) == [0, 1], "one of a higher priority has the rest of it"
    assert under_test.num_preemptions == 0


def test_nobody_goes_for_blocks_that_others_hold_too() -> None:
    """None of the four blocks that two share with one of a higher priority would become free."""
    under_test = scheduler(running=4, budget=256)
    under_test.add(urgent := make(0, [7] * 64 + [0] * 4, 20, priority=5))
    step(under_test)
    for number in (1, 2):
        under_test.add(make(number, [7] * 64 + [number] * 4, 8))
    step(under_test)
    assert under_test.pool.available == 3
    under_test.add(make(3, [3] * 108, 3, priority=3))
    while urgent.state is SequenceState.RUNNING and {1, 2} & {*running(under_test)}:
        assert step(under_test).items
        assert under_test.num_preemptions == 0, "they would make room for five"
    while under_test:
        step(under_test)


def test_blocks_that_only_victims_share_become_free_once() -> None:
    under_test = scheduler(running=4, budget=256)
    under_test.add(make(0, [7] * 64 + [0] * 4, 20))
    step(under_test)
    under_test.add(make(1, [7] * 64 + [1] * 4, 20))
    step(under_test)
    assert under_test.pool.available == 4
    under_test.add(make(2, [2] * 150, 3, priority=1))
    assert [item.sequence_id for item in step(under_test).items] == [2]
    assert running(under_test) == [2]


def test_the_prefix_that_it_begins_with_is_not_counted_as_freed() -> None:
    under_test = scheduler(running=4, budget=256)
    under_test.add(make(0, [0] * 64, 30, priority=2))
    under_test.add(make(1, [7] * 64, 8))
    step(under_test)
    under_test.add(make(2, [7] * 64 + [2] * 64, 3, priority=1))
    step(under_test)
    assert (running(under_test), under_test.num_preemptions) == ([0, 1], 0)


def test_a_long_prompt_of_a_lower_priority_yields_its_part_of_the_step() -> None:
    under_test = scheduler(running=4, budget=16, blocks=40)
    under_test.add(make(0, [0] * 400, 4))
    step(under_test)
    under_test.add(make(1, [1] * 20, 2, priority=1))
    assert [(item.sequence_id, len(item.token_ids)) for item in step(under_test).items] == [(1, 16)]
    assert [(item.sequence_id, len(item.token_ids)) for item in step(under_test).items] == [(1, 4), (0, 12)]
    assert running(under_test) == [0, 1], "it keeps its place"


def test_who_has_lost_its_place_often_keeps_it() -> None:
    """Else one that takes long would never end, and all that was computed of it were in vain."""
    under_test = scheduler(running=1, budget=64, blocks=30)
    under_test.add(low := make(0, [0] * 20, 40))
    step(under_test)
    for number in range(1, 20):
        under_test.add(make(number, [number] * 20, 3, priority=number))
        step(under_test)
        while under_test.running != [low] and low.state is not SequenceState.FINISHED:
            step(under_test)
    assert low.displaced == MAX_DISPLACEMENTS
    while under_test:
        step(under_test)
    assert low.displaced == MAX_DISPLACEMENTS


ranked = st.tuples(
    st.integers(1, 5 * BLOCK_TOKENS), st.integers(1, 40), st.integers(-2, 2), st.integers(0, 30), st.integers(0, 4)
)  # prompt, output, priority, arrives at this step, begins with so many blocks that others begin with too


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(ranked, min_size=2, max_size=14), st.integers(4, 64), st.integers(1, 4), st.integers(1, 2))
def test_no_lower_priority_runs_in_the_place_of_a_higher_one(
    jobs: list[tuple[int, int, int, int, int]], budget: int, places: int, lanes: int
) -> None:
    under_test = Scheduler(BlockPool(BLOCKS), max_batch_tokens=budget, max_running=places, lanes=lanes)
    sequences: list[Sequence] = []
    for now in range(10_000):
        for number, (length, output, priority, arrives, shared) in enumerate(jobs):
            if arrives == now:
                common = min(length - 1, shared * BLOCK_TOKENS)
                prompt = [99] * common + [number] * (length - common)
                sequences.append(make(number, prompt, output, priority))
                under_test.add(sequences[-1])
        if now > 30 and not under_test:
            break
        forced = under_test.num_preemptions
        before, ran = {sequence.id: sequence.displaced for sequence in sequences}, running(under_test)
        displaced = sum(before.values())
        finished = sum(sequence.state is SequenceState.FINISHED for sequence in sequences)
        plan = step(under_test)
        assert plan.items or not under_test
        assert plan.num_tokens <= budget
        assert len(under_test.running) <= places
        under_test.pool.check()
        assert all(sequence.displaced <= MAX_DISPLACEMENTS for sequence in sequences)
        lost = [sequence for sequence in sequences if sequence.displaced > before.get(sequence.id, 0)]
        planned = {item.sequence_id: len(item.token_ids) for item in plan.items}
        assert not lost or planned.keys() - {*ran}, "nobody was admitted in the place of those that went"
        forced = under_test.num_preemptions - forced
        if forced > sum(sequence.displaced for sequence in sequences) - displaced:
            continue  # room was found by force for one that runs: others are admitted by the next step
        if sum(sequence.state is SequenceState.FINISHED for sequence in sequences) > finished:
            continue  # there was less room when the step was planned
        for one in under_test.waiting[:1]:  # those behind it must not overtake it
            lesser = [s for s in under_test.running if s.request.priority < one.request.priority]
            free = [s for s in lesser if s.displaced < MAX_DISPLACEMENTS]
            needed = blocks_for(one.num_tokens + 1)
            assert not (
                free
                and any(planned.get(s.id, 0) > (plan.num_tokens == budget) for s in lesser)  # one token is no chunk
                and needed <= under_test.pool.available
            ), "it had room, and a lower one had the place or the step"
    assert all(sequence.state is SequenceState.FINISHED for sequence in sequences)
    assert all(len(sequence.output_ids) == sequence.request.sampling.max_tokens for sequence in sequences)
    under_test.pool.check(idle=True)


def test_the_least_important_of_several_loses_its_place() -> None:
    under_test = scheduler(budget=64, blocks=3)
    first, second, third = (make(number, [number] * (BLOCK_TOKENS - 1), 4) for number in range(3))
    for sequence in (first, second, third):
        under_test.add(sequence)
    while under_test.num_preemptions == 0:
        step(under_test)
    assert [sequence.state for sequence in (first, second, third)] == [
        SequenceState.RUNNING,
        SequenceState.RUNNING,
        SequenceState.WAITING,
    ]


def test_a_prompt_that_fills_its_blocks_waits_for_room_for_its_first_token() -> None:
    under_test = scheduler(blocks=3)
    under_test.add(make(0, [1] * (BLOCK_TOKENS + 1), 8))
    step(under_test)
    under_test.add(fills := make(1, [2] * BLOCK_TOKENS, 4))
    assert [item.sequence_id for item in step(under_test).items] == [0]
    assert fills.state is SequenceState.WAITING


def test_a_step_that_could_sample_nothing_is_made_once_more() -> None:
    under_test = scheduler()
    under_test.add(make(0, [1] * 5, 2))
    plan = under_test.plan()
    allocations = under_test.launched(plan)
    under_test.landed(plan)
    under_test.commit(zip(plan.items, allocations, strict=True))
    under_test.step_back(plan.items[0])
    assert [(item.start, item.token_ids) for item in under_test.plan().items] == [(4, (1,))]


def test_tokens_of_a_step_without_a_result_are_planned_again() -> None:
    under_test = scheduler()
    under_test.add(make(0, [1] * 5, 2))
    plan = under_test.plan()
    under_test.undo_launch(plan, under_test.launched(plan))
    assert under_test.plan().items == plan.items
