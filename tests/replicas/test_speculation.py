"""Drafts from a sequence's own tokens: the same tokens come, several at a time."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from engine_parts import Clock, Letters
from fake_runner import AheadRunner, FakeRunner, logits_of
from hypothesis import given, settings

from motley.replicas.demo import demo_path
from motley.replicas.engine.drafting.drafter_registry import Drafter, find_drafter
from motley.replicas.engine.drafting.ngram_drafter import NgramDrafter, NgramIndex
from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.sequence import Sequence
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineFault, InvalidRequest
from motley.replicas.execution.draft_acceptance import accept_drafts
from motley.replicas.execution.step_plan import ItemResult, PlanItem, SampleSpec
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.types import Delta, FinishReason, Request, SamplingParams, StreamMessage, TokenLogprob

VOCAB, EOS = 11, 10


def parroting(history: list[int]) -> torch.Tensor:
    """The last two tokens mostly decide, as they do in text that repeats itself; at times all that came before does."""
    logits = logits_of(history[-2:], VOCAB)
    whole = logits_of(history, VOCAB)
    return whole if whole[0] > 4.5 else logits


class Parrot(FakeRunner):
    def _logits(self, history: list[int]) -> torch.Tensor:
        logits = parroting(history)
        return logits * torch.nan if history[-1] in self.poisoned else logits


class Counting(FakeRunner):
    """0, 1, 2, 3 and again: every draft is right."""

    def _logits(self, history: list[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor((history[-1] + 1) % 4), VOCAB).float()


class ParrotAhead(Parrot, AheadRunner):
    pass


def engine(
    drafts: int,
    blocks: int = 24,
    budget: int = 32,
    running: int = 8,
    runner: type[FakeRunner] = Parrot,
    drafter: Drafter | None = None,
) -> EngineCore:
    pool = BlockPool(blocks)
    scheduler = Scheduler(
        pool, max_batch_tokens=budget, max_running=running, max_drafts=drafts, drafter=drafter or NgramDrafter()
    )
    limits = ModelLimits(vocab_size=VOCAB, max_model_len=96, eos_token_ids=(EOS,))
    return EngineCore(runner(blocks, VOCAB), scheduler, limits, Letters(), clock=Clock())  # type: ignore[arg-type]


def request(prompt: list[int], **params: Any) -> Request:
    deadline = params.pop("deadline_s", None)
    params = {"temperature": 0.0, "max_tokens": 40, "seed": 5, "ignore_eos": True} | params
    return Request("r", tuple(prompt), SamplingParams(**params), deadline_s=deadline)


def run(core: EngineCore, requests: list[Request]) -> list[list[StreamMessage]]:
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
        core.scheduler.pool.check()
    assert not core.busy
    core.scheduler.pool.check(idle=True)
    return messages


def told(messages: list[StreamMessage], index: int = 0) -> Delta:
    deltas = [delta for message in messages for delta in message.deltas if delta.index == index]
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return Delta(
        index,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        tuple(item for delta in deltas for item in delta.logprobs or ()),
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
    )


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"temperature": 0.4},
    {"temperature": 1.0, "top_p": 0.8, "n": 2},
    {"frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"repetition_penalty": 1.3, "temperature": 0.3},
    {"ignore_eos": False, "min_tokens": 9},
    {"stop": ("ab", "ef", "gg")},
    {"stop_token_ids": (3,), "min_tokens": 4},
    {"logit_bias": {2: 3.0}},
    {"max_tokens": 3},
]


@pytest.mark.slow("60 drawn batches, each answered with drafts and without")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.sampled_from(SAMPLINGS)),
        min_size=1,
        max_size=6,
    ),
    drafts=st.integers(1, 12),
    budget=st.integers(8, 48),
    blocks=st.integers(12, 40),
    runner=st.sampled_from([Parrot, ParrotAhead]),
)
def test_nothing_that_is_told_depends_on_drafts(
    batch: list[tuple[list[int], dict[str, Any]]], drafts: int, budget: int, blocks: int, runner: type[FakeRunner]
) -> None:
    """Greedy and seeded, with penalties, stop strings, eos and log-probabilities; preempted, in any company.

    The runner reads every token of a history from the KV blocks: one that was drafted in vain would be read.
    """
    requests = [request(prompt, **sampling) for prompt, sampling in batch]
    expected = run(engine(0, blocks, budget), requests)
    found = run(engine(drafts, blocks, budget, runner=runner), requests)
    for one, theirs, ours in zip(requests, expected, found, strict=True):
        for index in range(one.sampling.n):
            assert told(ours, index) == told(theirs, index)


def test_what_repeats_itself_takes_fewer_steps() -> None:
    slow, quick = engine(0), engine(8)
    one = request([1, 2, 3, 1, 2, 3], max_tokens=64)
    assert told(run(quick, [one])[0]) == told(run(slow, [one])[0])
    load = quick.load()
    assert quick.num_steps < 0.6 * slow.num_steps
    assert 0 < load.accepted_tokens < load.drafted_tokens, "some were right and some were not"
    assert quick.num_steps + load.accepted_tokens == slow.num_steps
    assert (slow.load().drafted_tokens, slow.load().accepted_tokens) == (0, 0)
    counts = quick.scheduler.draft_counts
    assert 0 < counts.drafts <= quick.num_steps
    assert counts.drafted == load.drafted_tokens >= counts.drafts
    by_position = [*counts.by_position.values()]
    assert sum(by_position) == load.accepted_tokens
    assert by_position == sorted(by_position, reverse=True), "a token is accepted after those before it alone"
    assert [*counts.by_position] == [str(position) for position in range(len(by_position))]


def test_prefixes_found_later_hold_the_tokens_that_were_said() -> None:
    """The second request goes on from the first one's text: its blocks must hold no draft that was wrong."""
    core = engine(12, blocks=40)
    first = request([1, 2, 1, 2], max_tokens=50)
    said = told(run(core, [first])[0]).token_ids
    assert core.load().accepted_tokens < core.load().drafted_tokens
    again = request([1, 2, 1, 2, *said, 7], max_tokens=20)
    [messages] = run(core, [again])
    assert messages[0].cached_tokens >= 32
    assert told(messages) == told(run(engine(0, blocks=40), [again])[0])


def test_a_message_has_one_delta_for_a_choice() -> None:
    [messages] = run(engine(8), [request([1, 2, 3, 1, 2, 3], max_tokens=64, logprobs=1)])
    most = [delta for message in messages for delta in message.deltas]
    assert all(len(message.deltas) == 1 for message in messages)
    assert max(len(delta.token_ids) for delta in most) > 3
    assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in most)


def test_a_deadline_ends_it_between_two_steps() -> None:
    core = engine(8)
    core.add(0, request([1, 2, 3, 1, 2, 3], max_tokens=80, deadline_s=10.0))
    for _ in range(6):
        core.step()
    core._clock.now = 11.0  # type: ignore[attr-defined]
    [emission] = core.step()
    assert emission.done
    assert emission.message.deltas[-1].finish_reason is FinishReason.DEADLINE
    core.scheduler.pool.check(idle=True)


def test_others_are_not_made_to_wait_for_drafts() -> None:
    """Every sequence that decodes has a token of each step, and no draft makes one give up its blocks."""
    core = engine(12, blocks=60, budget=9, running=8)
    for key in range(8):
        core.add(key, request([key % 4, 1, 2, 1, 2], max_tokens=30))
    while core.scheduler.waiting or any(s.remaining > 1 for s in core.scheduler.running):
        core.step()
    while len(core.scheduler.running) > 1:
        before = {s.id: len(s.output_ids) for s in core.scheduler.running}
        core.step()
        assert all(len(s.output_ids) > before[s.id] for s in core.scheduler.running)
    assert core.load().accepted_tokens > 0


def test_drafts_leave_others_their_blocks() -> None:
    """One of three blocks is left: the second sequence needs it for its next token, the first would draft into it."""
    core = engine(12, blocks=3, budget=64, runner=Counting)
    core.add(0, request([0, 1, 2, 3] * 3 + [0, 1], max_tokens=20))
    core.add(1, request([9] * 12 + [0, 1, 2, 3], max_tokens=20))
    core.step()
    first, second = core.scheduler.running
    assert (first.num_tokens, second.num_tokens, core.scheduler.pool.available) == (15, 17, 1)
    core.step()
    assert first.num_tokens == 17, "a draft that has a place already"
    assert second.num_tokens > 17
    assert core.load().drafted_tokens > 0


@pytest.mark.parametrize(
    ("end", "said", "reason"),
    [
        ({"stop_token_ids": (2,)}, (0, 1, 2), 2),
        ({"stop": ("bc",)}, (0, 1, 2), "bc"),
        ({"stop_token_ids": (2,), "min_tokens": 4}, (0, 1, 0, 1, 2), 2),
    ],
)
def test_what_is_right_after_the_end_is_not_said(end: dict[str, Any], said: tuple[int, ...], reason: object) -> None:
    """The end lies within a run of drafts, of which those after it are right as well."""
    core = engine(12, runner=Counting)
    one = request([0, 1, 2, 3] * 3, max_tokens=20, **end)
    found = told(run(core, [one])[0])
    assert found == told(run(engine(0, runner=Counting), [one])[0])
    assert (found.token_ids, found.finish_reason, found.stop_reason) == (said, FinishReason.STOP, reason)
    assert core.load().accepted_tokens > 0


def test_the_last_token_is_reached_exactly() -> None:
    """However many are right, no more than max_tokens are said, and no block beyond the limit is asked for."""
    for most in range(1, 30):
        core = engine(12, blocks=6, runner=Counting)
        [messages] = run(core, [request([0, 1, 2, 3] * 2, max_tokens=most)])
        assert told(messages).token_ids == tuple(i % 4 for i in range(most))
        assert told(messages).finish_reason is FinishReason.LENGTH


def test_a_fault_behind_a_wrong_draft_is_none() -> None:
    """Logits after a token that nobody says are never looked at; after one that is said they end the request."""
    one = request([1, 2, 3, 1, 2, 3], max_tokens=40)
    plain = told(run(engine(0), [one])[0]).token_ids
    never = set(range(VOCAB)) - {*plain, 1, 2, 3}
    core = engine(8)
    core._runner.poisoned = never  # type: ignore[attr-defined]
    assert told(run(core, [one])[0]).token_ids == plain
    core = engine(8)
    core._runner.poisoned = {plain[20]}  # type: ignore[attr-defined]
    with pytest.raises(EngineFault, match="not finite"):
        run(core, [one])
    core.scheduler.pool.check(idle=True)


def test_a_step_that_fails_is_run_apart() -> None:
    core, plain = engine(8), engine(0)
    requests = [request([1, 2, 3, 1, 2, 3]), request([4, 1, 4, 1])]
    core._runner.fail_next = RuntimeError("out of memory")  # type: ignore[attr-defined]
    assert [told(one) for one in run(core, requests)] == [told(one) for one in run(plain, requests)]


def test_ngrams() -> None:
    ngrams = NgramIndex()
    ngrams.extend([5, 6, 7, 8, 5, 6])
    assert ngrams.draft(3) == (7, 8, 5)
    assert ngrams.draft(6) == (7, 8, 5, 6, 7, 8), "what repeats is drafted beyond the end"
    ngrams.extend([9, 5, 6])
    assert ngrams.draft(2) == (9, 5), "the last time counts"
    ngrams.extend([7, 8])
    assert ngrams.draft(1) == (5,), "three tokens say more than two"
    ngrams.extend([3])
    assert ngrams.draft(4) == ()
    assert NgramIndex().draft(4) == ()
    assert ngrams.draft(0) == ()


class CountingDrafter:
    """Says 0, 1, 2, 3 and again. asked: whose drafts were asked for, and not forgotten."""

    def __init__(self) -> None:
        self.asked: set[int] = set()

    def draft(self, sequence: Sequence, max_drafts: int) -> tuple[int, ...]:
        assert max_drafts > 0
        assert sequence.num_tokens == sequence.num_prompt + len(sequence.output_ids), "none is in flight"
        self.asked.add(sequence.id)
        last = sequence.tokens(sequence.num_tokens - 1, sequence.num_tokens)[0]
        return tuple((last + 1 + i) % 4 for i in range(max_drafts))

    def forget(self, sequence_id: int) -> None:
        self.asked.discard(sequence_id)


def test_the_scheduler_asks_its_drafter_and_says_which_sequences_have_ended() -> None:
    drafter = CountingDrafter()
    core = engine(7, runner=Counting, drafter=drafter)
    core.add(0, request([0], max_tokens=33))
    core.add(1, request([2], max_tokens=90))
    while core.busy:
        core.step()
        ours = {sequence.id for sequence in core.scheduler.sequences}
        assert drafter.asked <= ours
    assert core.num_steps < 20, "eight tokens a step, as every draft is right"
    assert core.load().drafted_tokens == core.load().accepted_tokens > 70


def test_a_drafter_is_chosen_by_its_name() -> None:
    assert find_drafter(EngineConfig().drafter) is NgramDrafter
    with pytest.raises(InvalidRequest, match="drafter: 'medusa' is not accepted; expected 'ngram'"):
        Engine(demo_path(), drafter="medusa")
    with pytest.raises(InvalidRequest, match="drafter: 3 is not accepted; expected the name of a drafter"):
        EngineConfig(drafter=3)  # type: ignore[arg-type]


def test_drafts_are_accepted_up_to_the_first_that_is_wrong() -> None:
    spec = SampleSpec(SamplingParams(seed=0), 0, 0, 0, (), (), ())
    item = PlanItem(0, 9, (1, 2, 3, 4), (0,), spec, verified=(spec, spec, spec))
    tokens = [TokenLogprob(token, -1.0) for token in (2, 3, 4, 5)]

    def given(*found: int | None) -> ItemResult:
        results = [ItemResult(fault="bad") if n is None else ItemResult(token=TokenLogprob(n, -1.0)) for n in found]
        return accept_drafts(item, results)

    assert given(2, 3, 4, 5) == ItemResult(token=tokens[3], accepted=tuple(tokens[:3]))
    assert given(2, 3, 9, 5) == ItemResult(token=TokenLogprob(9, -1.0), accepted=tuple(tokens[:2]))
    assert given(9, 3, 4, 5) == ItemResult(token=TokenLogprob(9, -1.0))
    assert given(2, None, 4, 5) == ItemResult(token=tokens[0]), "the next step finds the fault"
    assert given(None, 3, 4, 5) == ItemResult(fault="bad")


PROMPTS = [
    "The with statement",
    "with open(path) as f:\n    pass\nwith open(path) as f:\n    pass\n",
    "A class is",
    "1, 2, 1, 2",
]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "seed": 3}, {"repetition_penalty": 1.2}, {"stop": ("the",)}]
)
def test_the_demo_model_says_the_same(sampling: dict[str, Any]) -> None:
    """Numerics are exact, so that the texts agree token for token, in one batch and each alone."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 96, "logprobs": 1, **sampling})
    plain = Engine(demo_path(), numerics="exact", threads=1, max_model_len=512)
    quick = Engine(demo_path(), numerics="exact", threads=1, max_model_len=512, speculate_ngram=6)
    expected = [result.outputs[0] for result in plain.generate(PROMPTS, params)]
    assert [result.outputs[0] for result in quick.generate(PROMPTS, params)] == expected
    assert [quick.generate(prompt, params)[0].outputs[0] for prompt in PROMPTS] == expected
    load = quick._built.core.load()
    assert load.drafted_tokens > 0


def test_a_grammar_is_not_speculated_on() -> None:
    from motley import GrammarSpec

    spec = GrammarSpec.regex("(ab|cd){1,40}")
    params = SamplingParams(temperature=0.0, max_tokens=24, grammar=spec)
    plain = Engine(demo_path(), threads=1, max_model_len=256)
    quick = Engine(demo_path(), threads=1, max_model_len=256, speculate_ngram=6)
    assert quick.generate("ababab", params)[0].outputs == plain.generate("ababab", params)[0].outputs
    assert quick._built.core.load().drafted_tokens == 0


@pytest.mark.parametrize("value", [-1, 33, True, 1.5])
def test_what_is_no_number_of_drafts_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="speculate_ngram"):
        EngineConfig(speculate_ngram=value)
