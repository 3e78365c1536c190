from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from engine_parts import Clock, Letters
from fake_runner import AheadRunner, FakeRunner, StagedRunner, logits_of
from hypothesis import given, settings

from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.errors import EngineFault, InvalidRequest
from motley.replicas.execution.step_plan import MAX_BIASED, StepPlan, StepResult
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.types import Delta, FinishReason, Request, SamplingParams, StreamMessage

VOCAB = 27
EOS = 26


@pytest.fixture(autouse=True, scope="module", params=[FakeRunner, AheadRunner, StagedRunner])
def runner(request: pytest.FixtureRequest) -> None:
    """Everything here holds as well where a step is launched before the one before it is known."""
    global Runner
    Runner = request.param


Runner: type[FakeRunner] = FakeRunner


def engine(blocks: int = 16, budget: int = 32, running: int = 8, reuse: bool = True, max_len: int = 96) -> EngineCore:
    lanes = StagedRunner.depth if Runner is StagedRunner else 1
    pool = BlockPool(blocks, reuse_prefixes=reuse)
    scheduler = Scheduler(pool, max_batch_tokens=budget, max_running=running, lanes=lanes)
    limits = ModelLimits(vocab_size=VOCAB, max_model_len=max_len, eos_token_ids=(EOS,))
    return EngineCore(Runner(blocks, VOCAB), scheduler, limits, Letters(), clock=Clock())  # type: ignore[arg-type]


def request(prompt: list[int], output_ids: tuple[tuple[int, ...], ...] = (), **params: Any) -> Request:
    deadline, priority = params.pop("deadline_s", None), params.pop("priority", 0)
    params = {"temperature": 0.0, "max_tokens": 12, "seed": 5, "ignore_eos": True} | params
    return Request(
        "r", tuple(prompt), SamplingParams(**params), output_ids=output_ids, deadline_s=deadline, priority=priority
    )


def run(core: EngineCore, requests: list[Request]) -> list[list[StreamMessage]]:
    """All messages of each request, submitted together."""
    messages: list[list[StreamMessage]] = [[] for _ in requests]
    for key, one in enumerate(requests):
        core.add(key, one)
    for _ in range(5000):
        if not core.busy:
            break
        for emission in core.step():
            messages[emission.key].append(emission.message)
            if emission.error:
                raise emission.error
    assert not core.busy
    core.scheduler.pool.check(idle=True)
    return messages


def choice(messages: list[StreamMessage], index: int = 0) -> Delta:
    """All deltas of one choice as one."""
    deltas = [delta for message in messages for delta in message.deltas if delta.index == index]
    ends = [delta.finish_reason for delta in deltas if delta.finish_reason]
    assert len(ends) == 1, "every choice ends exactly once"
    assert deltas[-1].finish_reason, "and nothing follows its end"
    return Delta(
        index,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        tuple(item for delta in deltas for item in delta.logprobs or ()),
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
    )


def naive(prompt: list[int], length: int) -> tuple[int, ...]:
    history = list(prompt)
    for _ in range(length):
        history.append(int(logits_of(history, VOCAB).argmax()))
    return tuple(history[len(prompt) :])


def alone(one: Request) -> Delta:
    return choice(run(engine(), [one])[0])


prompts = st.tuples(st.integers(0, 1), st.integers(1, 70), st.integers(0, 25)).map(
    lambda p: [p[0]] * (p[1] - 1) + [p[2]]  # families that share prefixes
)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(prompts, min_size=1, max_size=6),
    budget=st.integers(8, 64),
    blocks=st.integers(6, 16),
    reuse=st.booleans(),
)
def test_greedy_text_is_that_of_a_naive_loop(batch: list[list[int]], budget: int, blocks: int, reuse: bool) -> None:
    """Whatever the chunking, batching, prefix hits and preemptions."""
    core = engine(blocks=blocks, budget=budget, reuse=reuse)
    messages = run(core, [request(prompt, priority=i % 3) for i, prompt in enumerate(batch)])
    for prompt, stream in zip(batch, messages, strict=True):
        got = choice(stream)
        assert got.token_ids == naive(prompt, 12)
        assert got.finish_reason is FinishReason.LENGTH


def test_preemption_happens_in_a_small_pool_and_changes_nothing() -> None:
    core = engine(blocks=6)
    batch = [[i] * 30 for i in range(4)]
    messages = run(core, [request(prompt, max_tokens=40) for prompt in batch])
    assert core.scheduler.num_preemptions > 0
    assert [choice(stream).token_ids for stream in messages] == [naive(prompt, 40) for prompt in batch]


resumable = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.integers(1, 20),
        "top_p": st.floats(0.3, 1.0),
        "min_p": st.floats(0.0, 0.3),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2),
        "logit_bias": st.dictionaries(st.integers(0, EOS), st.floats(-3, 3), max_size=3),
        "seed": st.integers(0, 2**63 - 1),
        "logprobs": st.integers(0, 3),
        "min_tokens": st.integers(0, 6),
        "max_tokens": st.integers(6, 14),
        "stop": st.lists(st.text("abcdefgh", min_size=1, max_size=3), max_size=3),
        "stop_token_ids": st.lists(st.integers(0, EOS), max_size=2),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 3),
    },
)


@pytest.mark.slow("30 drawn requests, each resumed after every one of its tokens")
@settings(max_examples=30, deadline=None)
@given(params=resumable, prompt=prompts.filter(lambda p: len(p) < 40))
def test_resume_continues_exactly_for_every_k(params: dict[str, Any], prompt: list[int]) -> None:
    whole_run = run(engine(), [request(prompt, **params)])[0]
    for index in range(params.get("n", 1)):
        whole = choice(whole_run, index)
        assert len(whole.token_ids) >= params.get("min_tokens", 0)
        sent = _text_after_each_token(whole_run, index)
        for k in range(len(whole.token_ids) + 1):
            so_far = [()] * params.get("n", 1)
            so_far[index] = whole.token_ids[:k]
            rest = choice(run(engine(), [request(prompt, tuple(so_far), **params)])[0], index)
            assert rest.token_ids == whole.token_ids[k:]
            assert rest.text == whole.text[len(sent[k]) :]
            assert rest.logprobs == (whole.logprobs or ())[k:]
            assert (rest.finish_reason, rest.stop_reason) == (whole.finish_reason, whole.stop_reason)


def _text_after_each_token(messages: list[StreamMessage], index: int) -> list[str]:
    """The text that had been sent when k tokens had been, for every k."""
    deltas = [delta for message in messages for delta in message.deltas if delta.index == index]
    assert all(len(delta.token_ids) == 1 for delta in deltas)
    return ["", *itertools.accumulate(delta.text for delta in deltas)]


def test_choices_differ_by_number_and_share_their_prompt() -> None:
    core = engine()
    stream = run(core, [request([3] * 40, temperature=1.5, n=3)])[0]
    assert len({choice(stream, index).token_ids for index in range(3)}) == 3
    assert core.scheduler.pool.hit_tokens == 2 * 32


def test_stop_string_never_leaks_and_is_named() -> None:
    prompt = [1, 2, 3]
    text = "".join(chr(ord("a") + token) for token in naive(prompt, 12))
    got = alone(request(prompt, stop=[text[4:6]]))
    assert (got.text, got.finish_reason, got.stop_reason) == (text[:4], FinishReason.STOP, text[4:6])
    assert len(got.token_ids) == 6


def test_stop_token_ends_without_its_text() -> None:
    tokens = naive([4], 12)
    first = tokens.index(tokens[5])
    got = alone(request([4], stop_token_ids=[tokens[5]]))
    assert got.token_ids == tokens[: first + 1]
    assert got.stop_reason == tokens[5]
    assert len(got.text) == first


def test_a_stop_string_is_the_end_of_the_text_where_that_is_asked_for() -> None:
    prompt = [1, 2, 3]
    text = "".join(chr(ord("a") + token) for token in naive(prompt, 12))
    got = alone(request(prompt, stop=[text[4:6]], include_stop_str_in_output=True))
    assert (got.text, got.finish_reason, got.stop_reason) == (text[:6], FinishReason.STOP, text[4:6])


def test_a_stop_token_has_its_text_where_that_is_asked_for_and_an_end_of_sequence_has_none() -> None:
    tokens = naive([4], 12)
    got = alone(request([4], stop_token_ids=[tokens[5]], include_stop_str_in_output=True))
    assert got.text == "".join(chr(ord("a") + token) for token in got.token_ids)
    ended = alone(request([1], logit_bias={EOS: 100.0}, ignore_eos=False, include_stop_str_in_output=True))
    assert (ended.token_ids, ended.text) == ((EOS,), "")


def test_no_token_but_the_allowed_ones_is_chosen() -> None:
    for heat in (0.0, 1.5):
        got = alone(request([1, 2, 3], allowed_token_ids=[5, 7, 11], temperature=heat))
        assert set(got.token_ids) <= {5, 7, 11}
        assert len(got.token_ids) == 12
    assert len(set(got.token_ids)) > 1
    assert alone(request([1], allowed_token_ids=[EOS], ignore_eos=False)).token_ids == (EOS,)
    kept = alone(request([1], allowed_token_ids=[EOS], ignore_eos=False, min_tokens=3))
    assert kept.token_ids == (EOS,) * 4, "nothing else is allowed, so that is chosen though it may not end the text yet"


def test_a_bad_word_is_never_written_and_its_parts_are() -> None:
    """Covers words of one letter and of several; what may follow depends on the token that a step before chooses."""
    prompt = [1, 2, 3]
    text = "".join(chr(ord("a") + token) for token in naive(prompt, 12))
    word, letter = text[2:5], text[8]
    got = alone(request(prompt, bad_words=[word]))
    assert got.text[:4] == text[:4], "the beginning of it is no bad word"
    assert got.text[4] != text[4]
    assert word not in got.text
    assert len(got.text) == 12
    assert letter not in alone(request(prompt, bad_words=[letter])).text
    beside = run(engine(), [request(prompt, bad_words=[word]), request(prompt)])
    assert "".join(delta.text for message in beside[1] for delta in message.deltas) == text, (
        "a neighbour's is as it was"
    )


def test_eos_ends_unless_ignored() -> None:
    bias = {EOS: 100.0}
    assert alone(request([1], logit_bias=bias, ignore_eos=False)).token_ids == (EOS,)
    assert alone(request([1], logit_bias=bias, ignore_eos=True)).token_ids == (EOS,) * 12
    late = alone(request([1], logit_bias=bias, ignore_eos=False, min_tokens=3))
    assert late.token_ids[-1] == EOS
    assert len(late.token_ids) == 4
    assert EOS not in late.token_ids[:3]


def test_the_context_ends_a_choice_by_length() -> None:
    got = alone(request([1] * 90, max_tokens=50))
    assert len(got.token_ids) == 6
    assert got.finish_reason is FinishReason.LENGTH
    assert len(alone(request([1] * 95, max_tokens=None)).token_ids) == 1


@pytest.mark.parametrize(
    ("bad", "param", "code"),
    [
        (request([1] * 96), "prompt", "context_length_exceeded"),
        (request([VOCAB]), "prompt", "invalid_value"),
        (request([1], stop_token_ids=[VOCAB]), "stop_token_ids", "invalid_value"),
        (request([1], logit_bias={VOCAB: 1.0}), "logit_bias", "invalid_value"),
        (request([1], ((VOCAB,),)), "output_ids", "invalid_value"),
        (request([1], ((1,) * 13,)), "output_ids", "invalid_value"),
    ],
)
def test_what_the_model_cannot_serve_is_refused_by_name(bad: Request, param: str, code: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine().check(bad)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_prompt_logprobs_survive_chunks_prefixes_and_preemption() -> None:
    prompt = [(i * 7) % 26 for i in range(45)]
    core = engine(blocks=6, budget=8)
    run(core, [request(prompt)])  # so that a prefix could be found
    first, _ = run(
        core, [request(prompt, prompt_logprobs=2, max_tokens=40), request([2] * 40, max_tokens=40, priority=1)]
    )
    got = first[0].prompt_logprobs
    assert got is not None
    assert got[0] is None
    for position in range(1, len(prompt)):
        expected = torch.log_softmax(logits_of(prompt[:position], VOCAB), 0)
        item = got[position]
        assert item is not None
        assert item.token_id == prompt[position]
        assert item.logprob == pytest.approx(float(expected[prompt[position]]), abs=1e-5)
        assert item.top[0][0] == int(expected.argmax())
    assert len(got) == len(prompt)


@pytest.mark.parametrize("steps", [0, 2], ids=["in the queue", "after a part of the prompt"])
def test_a_prompt_that_was_not_computed_has_no_logprobs(steps: int) -> None:
    core = engine(budget=8)
    core.add(0, request([1] * 45, prompt_logprobs=0, deadline_s=5.0))
    assert not [emission for _ in range(steps) for emission in core.step()]
    core._clock.now = 6.0  # type: ignore[attr-defined]
    [emission] = core.step()
    assert [delta.finish_reason for delta in emission.message.deltas] == [FinishReason.DEADLINE]
    assert emission.message.prompt_logprobs is None


def test_cancel_frees_everything_in_every_state() -> None:
    core = engine(running=1)
    for key in range(3):
        core.add(key, request([key] * 40))
    core.step()
    for key in (1, 0, 2, 2, 77):
        core.cancel(key)
    assert not core.busy
    core.scheduler.pool.check(idle=True)


def test_deadline_ends_waiting_and_running_and_a_past_one_never_runs() -> None:
    core = engine(running=1)
    clock = core._clock
    core.add(0, request([1] * 10, deadline_s=5.0, max_tokens=50))
    core.add(1, request([2] * 10, deadline_s=5.0))
    core.add(2, request([3] * 10, deadline_s=0.0))
    seen: dict[int, list[StreamMessage]] = {0: [], 1: [], 2: []}
    for step in range(20):
        clock.now = float(step)  # type: ignore[attr-defined]
        for emission in core.step():
            seen[emission.key].append(emission.message)
    ends = {key: choice(messages) for key, messages in seen.items()}
    assert {end.finish_reason for end in ends.values()} == {FinishReason.DEADLINE}
    # A token on its way is not waited for; of a pipeline, one call launches a step and the next one lands it.
    in_time = {FakeRunner: 5, AheadRunner: 4, StagedRunner: 2}[Runner]
    assert [len(ends[key].token_ids) for key in (0, 1, 2)] == [in_time, 0, 0]
    assert not core.busy


def test_a_failed_step_ends_its_stream_with_a_fault_and_the_engine_lives_on() -> None:
    core = engine()
    core._runner.fail_next = RuntimeError("device is gone")  # type: ignore[attr-defined]
    with pytest.raises(EngineFault, match="device is gone"):
        run(core, [request([1] * 5)])
    assert core.failed_steps == 1
    assert choice(run(core, [request([1] * 5)])[0]).token_ids == naive([1] * 5, 12)
    assert core.failed_steps == 0


def test_what_is_too_much_for_a_step_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine()
    runner = core._runner
    take = runner.run

    def out_of_memory(plan: StepPlan) -> StepResult:
        if any(9 in item.token_ids for item in plan.items):
            raise RuntimeError("out of memory")
        return take(plan)

    monkeypatch.setattr(runner, "run", out_of_memory)
    neighbours = [request([1] * 5), request([2] * 20), request([1] * 40, n=2)]
    for key, one in enumerate([*neighbours, request([9] * 30, n=2, logit_bias={9: -100.0})]):
        core.add(key, replace(one, sampling=replace(one.sampling, logit_bias={9: -100.0})))
    seen: dict[int, list[StreamMessage]] = {key: [] for key in range(4)}
    ended: dict[int, object] = {}
    while core.busy:
        for emission in core.step():
            seen[emission.key].append(emission.message)
            if emission.done:
                ended[emission.key] = emission.error
    assert isinstance(ended.pop(3), EngineFault)
    assert ended == dict.fromkeys(range(3))
    monkeypatch.undo()
    alone = run(engine(), [replace(one, sampling=replace(one.sampling, logit_bias={9: -100.0})) for one in neighbours])
    for key in range(3):
        assert choice(seen[key]).token_ids == choice(alone[key]).token_ids
    core.scheduler.pool.check(idle=True)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(turns=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), budget=st.integers(8, 40))
def test_what_is_held_up_at_any_time_goes_on_as_if_nothing_had_been(turns: list[tuple[int, bool]], budget: int) -> None:
    """Also between the launch of a step and its result, where its sequence may have lost its place meanwhile."""
    core = engine(blocks=24, budget=budget)
    prompts = [[1] * 40, [1] * 40, [2] * 20, [3] * 5]
    requests = [
        request(prompt, max_tokens=20, **({} if key % 2 else {"temperature": 0.9}))
        for key, prompt in enumerate(prompts)
    ]
    seen: list[list[StreamMessage]] = [[] for _ in prompts]
    for key, one in enumerate(requests):
        core.add(key, one)
    for step in range(400):
        if not core.busy:
            break
        if step < len(turns):
            core.hold(*turns[step])
            core.hold(turns[step][0], turns[step][1] and step % 3 > 0)
        else:
            for key in range(4):
                core.hold(key, False)
        for emission in core.step():
            assert emission.error is None
            seen[emission.key].append(emission.message)
    assert not core.busy
    core.scheduler.pool.check(idle=True)
    for one, messages in zip(requests, seen, strict=True):
        assert choice(messages).token_ids == choice(run(engine(), [one])[0]).token_ids


def test_what_failed_is_not_tried_again_in_blocks_that_are_anothers_by_now() -> None:
    """Its sequence loses its place while the step is on its way, and the next step fills the blocks."""
    if Runner is not AheadRunner:
        pytest.skip("nothing is on its way when this runner fails")
    core = engine(blocks=6, budget=96, reuse=False)
    core.add(0, request([1] * 20, max_tokens=10))
    seen: dict[int, list[int]] = {0: [], 1: []}

    def step() -> None:
        for emission in core.step():
            assert emission.error is None
            seen[emission.key] += [token for delta in emission.message.deltas for token in delta.token_ids]

    for _ in range(3):
        step()
    core.hold(0, True)
    core.add(1, request([2] * 82, max_tokens=6))  # all six blocks
    core._runner.fail_next = RuntimeError("out of memory")  # type: ignore[attr-defined]
    step()
    core.hold(0, False)
    for _ in range(100):
        if core.busy:
            step()
    assert not core.busy
    assert tuple(seen[0]) == tuple(naive([1] * 20, 10))
    assert tuple(seen[1]) == tuple(naive([2] * 82, 6))


def test_what_is_too_much_for_a_step_takes_the_step_launched_after_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others decode beside it, plainly: where steps are launched ahead, one is on its way when another fails."""
    core = engine(max_len=200, blocks=64)
    runner = core._runner
    take = runner.run

    def out_of_memory(plan: StepPlan) -> StepResult:
        if any(len(item.token_ids) > 1 and item.token_ids[0] == 9 for item in plan.items):
            raise RuntimeError("out of memory")
        return take(plan)

    monkeypatch.setattr(runner, "run", out_of_memory)
    neighbours = [request([1] * 5, max_tokens=30), request([2] * 20, max_tokens=30, temperature=0.7)]
    seen: list[list[StreamMessage]] = [[], [], []]
    errors: list[object] = [None] * 3
    for key, one in enumerate(neighbours):
        core.add(key, one)
    for step in range(200):
        if step == 5:
            core.add(2, request([9] * 30))
        for emission in core.step():
            seen[emission.key].append(emission.message)
            errors[emission.key] = emission.error
    assert isinstance(errors[2], EngineFault)
    assert not core.busy
    monkeypatch.undo()
    alone = run(engine(max_len=200, blocks=64), neighbours)
    for key in range(2):
        assert errors[key] is None
        assert choice(seen[key]).token_ids == choice(alone[key]).token_ids
    core.scheduler.pool.check(idle=True)


def test_steps_are_launched_ahead_where_tokens_are_plain() -> None:
    if Runner is not AheadRunner:
        pytest.skip("this runner computes while it is called")
    core = engine()
    run(core, [request([1] * 5, max_tokens=12)])
    plain = core._runner.num_ahead  # type: ignore[attr-defined]
    assert plain == 11  # and the last is known to be the last: nothing is computed in vain
    run(core, [request([2] * 5, max_tokens=12, frequency_penalty=0.5)])
    assert core._runner.num_ahead == 2 * plain  # type: ignore[attr-defined]  # who has chosen a token has counted it
    run(core, [request([3] * 5, max_tokens=12, logprobs=2)])
    assert core._runner.num_ahead == 3 * plain  # type: ignore[attr-defined]  # and has the alternatives
    run(core, [request([4] * 5, max_tokens=12, logit_bias=dict.fromkeys(range(MAX_BIASED + 1), 0.5))])
    assert core._runner.num_ahead == 3 * plain  # type: ignore[attr-defined]  # the host chooses: it wants the logits


def plans_of_a_pipeline(requests: list[Request], **bounds: Any) -> tuple[list[StepPlan], int]:
    """Return the steps that were run, in order, and the maximum number that were on their way at once."""
    if Runner is not StagedRunner:
        pytest.skip("of a pipeline")
    core = engine(**bounds)
    seen = run(core, requests)
    for one, messages in zip(requests, seen, strict=True):
        prompt = list(one.prompt_ids)
        assert choice(messages).token_ids == naive(prompt, one.sampling.max_tokens or 0)
    return core._runner.plans, core._runner.most_ahead  # type: ignore[attr-defined]


def test_sequences_are_divided_among_the_stages_of_a_pipeline() -> None:
    """Seven in three steps on their way: three, two and two, in turn."""
    requests = [request([number] * 5, max_tokens=12) for number in range(7)]
    plans, most = plans_of_a_pipeline(requests, blocks=32)
    assert most == 3
    assert {len(plan.items) for plan in plans} <= {1, 2, 3}
    decodes = [{item.sequence_id for item in plan.items} for plan in plans[3:-3]]
    for three in zip(decodes, decodes[1:], decodes[2:], strict=False):
        assert sum(map(len, three)) == len(set().union(*three)) == 7


def test_one_sequence_has_a_pipeline_alone() -> None:
    plans, most = plans_of_a_pipeline([request([1] * 5, max_tokens=12)])
    assert (len(plans), most) == (12, 1)


def test_pieces_of_a_prompt_follow_each_other_through_a_pipeline() -> None:
    """Every stage computes them in order; only what is sampled must be known first."""
    plans, most = plans_of_a_pipeline([request([1] * 40, max_tokens=4)], budget=8)
    assert most == 3
    assert [len(plan.items[0].token_ids) for plan in plans] == [8] * 5 + [1] * 3


def test_nobody_finds_the_kv_of_a_fault() -> None:
    core = engine()
    core._runner.poisoned.add(9)  # type: ignore[attr-defined]
    with pytest.raises(EngineFault, match="not finite"):
        run(core, [request([1] * 40 + [9])])
    core._runner.poisoned.clear()  # type: ignore[attr-defined]
    [again] = run(core, [request([1] * 40 + [9])])
    assert again[0].cached_tokens == 0
    core.scheduler.pool.check(idle=True)


def test_not_finite_logits_end_their_own_request_only() -> None:
    core = engine()
    core._runner.poisoned.add(9)  # type: ignore[attr-defined]
    core.add(0, request([9], n=2))
    core.add(1, request([1] * 5, logit_bias={9: -100.0}))
    emissions = [emission for _ in range(40) for emission in core.step()]
    ended = {emission.key: emission.error for emission in emissions if emission.done}
    assert isinstance(ended[0], EngineFault)
    assert ended[1] is None


def test_usage_counts_the_cached_prompt_once() -> None:
    core = engine()
    run(core, [request([1] * 40)])
    first = run(core, [request([1] * 40, n=2)])[0][0]
    assert first.cached_tokens == 32
    second = run(core, [replace(request([1] * 40), cache_salt=b"other tenant")])[0][0]
    assert second.cached_tokens == 0


@pytest.mark.slow("40 drawn batches, of which each request is also answered alone")
@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(st.tuples(prompts, st.integers(-2, 2), st.integers(0, 6), resumable), min_size=2, max_size=5),
    places=st.integers(1, 3),
    budget=st.integers(8, 40),
)
def test_text_is_the_same_whoever_had_to_give_its_place_up(
    batch: list[tuple[list[int], int, int, dict[str, Any]]], places: int, budget: int
) -> None:
    """Higher priorities come while lower ones run: each says what it says alone, greedy or seeded."""
    core = engine(blocks=12, budget=budget, running=places)
    requests = [request(prompt, priority=priority, **sampling) for prompt, priority, _, sampling in batch]
    messages: list[list[StreamMessage]] = [[] for _ in requests]
    for key, (one, (_, _, steps, _)) in enumerate(zip(requests, batch, strict=True)):
        core.add(key, one)
        for _ in range(steps if key + 1 < len(requests) else 5000):
            for emission in core.step() if core.busy else ():
                assert emission.error is None
                messages[emission.key].append(emission.message)
    assert not core.busy
    core.scheduler.pool.check(idle=True)
    for one, stream in zip(requests, messages, strict=True):
        for index in range(one.sampling.n):
            assert choice(stream, index) == choice(run(engine(), [one])[0], index)


def test_a_higher_priority_is_answered_before_the_lower_ones_whose_place_it_takes() -> None:
    core = engine(running=1)
    ends: list[int] = []
    for key, priority in enumerate((0, 0, 7)):
        core.add(key, request([key] * 20, priority=priority, max_tokens=8))
        ends += [one.key for one in core.step() if one.message.deltas and one.message.deltas[-1].finish_reason]
    while core.busy:
        ends += [one.key for one in core.step() if one.message.deltas and one.message.deltas[-1].finish_reason]
    assert ends == [2, 0, 1]


def test_times_of_a_request_are_those_between_its_place_in_a_batch_its_first_token_and_its_last() -> None:
    core, ticks = engine(running=1), Clock()
    core._clock = ticks
    core.add(0, request([1, 2, 3], n=1, max_tokens=4), arrived=-2.0)
    core.add(1, request([4], max_tokens=2), arrived=0.0)  # waits for the first
    ends, told = {}, {}
    while core.busy:
        for emission in core.step():
            ends |= {emission.key: ticks.now} if emission.done else {}
            told |= {emission.key: emission.message.timings} if emission.message.timings else {}
        ticks.now += 1.0
    spreads = {name: getattr(core.timings, name).spread() for name in ("queue", "prefill", "decode", "inference")}
    assert {spread.count for spread in spreads.values()} == {2}, "each is in each, once"
    totals = {name: spread.total for name, spread in spreads.items()}
    assert totals["decode"] >= 3.0 + 1.0, "a step for each further token"
    assert totals["inference"] == totals["prefill"] + totals["decode"]
    assert totals["queue"] >= 2.0 + ends[0], "the second waited until the first had ended"
    assert [sum(of) for of in zip(*told.values(), strict=True)] == [totals["queue"], 0.0, totals["prefill"]]


def test_a_preempted_sequence_has_waited_once_and_one_without_tokens_was_not_computed() -> None:
    core = engine(blocks=6, max_len=64)
    for key, one in enumerate([request([1] * 20, max_tokens=40), request([2] * 20, max_tokens=40)]):
        core.add(key, one)
    told = 0
    while core.busy:
        told += sum(emission.message.preemptions for emission in core.step())
    assert told == core.scheduler.num_preemptions > 0
    assert core.timings.queue.spread().count == core.timings.prefill.spread().count == 2
    core.add(2, request([3] * 20))
    core.step()
    core.cancel(2)
    assert core.timings.queue.spread().count == 3
    assert core.timings.decode.spread().count == 2


def test_probes_and_what_is_forgotten_count_in_no_metric() -> None:
    core = engine()
    core.add(0, request([1, 2, 3], max_tokens=2), is_probe=True)
    while core.busy:
        core.step()
    assert core.timings.queue.spread().count == core.timings.decode.spread().count == core.load().queried_tokens == 0
    run(core, [request([1, 2, 3], max_tokens=2)])
    assert core.load().queried_tokens == 3
    core.forget_counts()
    assert core.timings.inference.spread().count == core.load().queried_tokens == 0
