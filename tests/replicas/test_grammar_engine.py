"""Grammars beside all else that an engine does: the same tokens as alone and unbroken, and each end has its reason."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from grammar_engine import make_engine, texts

from motley.replicas.engine import engine as engine_module
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import InvalidRequest
from motley.replicas.execution.step_plan import StepPlan, StepResult
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.grammar.process import grammar_process
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import FinishReason

OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
}
SPEC = GrammarSpec.json_schema(OBJECT)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "penalties": {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 1.0},
    "narrow": {"temperature": 1.5, "seed": 7, "top_k": 4, "top_p": 0.8, "min_p": 0.05},
    "bias": {"temperature": 1.0, "seed": 8, "logit_bias": {65: 100.0, 66: -100.0}},
}


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 1, "max_tokens": 400, "grammar": SPEC} | given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grammar")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder)


def ids(engine: Engine, sampling: SamplingParams, **more: Any) -> list[list[int]]:
    return [output.token_ids for output in engine.generate("Say something:", sampling, **more)[0].outputs]


@pytest.mark.parametrize("way", WAYS)
def test_resumed_is_unbroken(engine: Engine, way: str) -> None:
    whole = ids(engine, params(n=2, **WAYS[way]))
    for cut in (1, 7, len(whole[0]) - 1):
        begun = [choice[:cut] for choice in whole]
        rest = ids(engine, params(n=2, **WAYS[way]), output_ids=begun)
        assert [a + b for a, b in zip(begun, rest, strict=True)] == whole


def test_resumed_at_its_end_it_ends(engine: Engine) -> None:
    whole = ids(engine, params())
    output = engine.generate("Say something:", params(), output_ids=whole)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.STOP)


def test_an_output_that_does_not_follow_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="does not follow") as refused:
        ids(engine, params(), output_ids=[[65, 65]])
    assert (refused.value.param, refused.value.code) == ("grammar", "invalid_grammar")


def test_together_as_alone(engine: Engine) -> None:
    """Rows with a grammar, with another and with none, in one batch."""
    free = params(grammar=None, max_tokens=60)
    other = params(grammar=GrammarSpec.regex("[a-f]{3,40}"), seed=4)
    alone = [ids(engine, one) for one in (free, params(), other)]
    streams = [engine.stream("Say something:", one) for one in (free, params(), other)]
    together: list[list[int]] = [[], [], []]
    live = set(range(3))
    while live:
        for which in sorted(live):
            delta = next(streams[which], None)
            together[which] += delta.token_ids if delta else ()
            live -= set() if delta else {which}
    assert [[one] for one in together] == alone


def test_a_prefix_hit_changes_nothing(engine: Engine) -> None:
    prompt = "A long prompt, the same each time, of several blocks. " * 2
    first, again = (engine.generate(prompt, params())[0] for _ in range(2))
    assert again.cached_tokens > 0
    assert again.token_ids == first.token_ids


def test_preempted_is_unbroken(engine: Engine, tmp_path: Path) -> None:
    small = make_engine(tmp_path, max_model_len=256, kv_memory_bytes=24 * 16 * 3 * 2 * 2 * 16 * 4)
    prompts = [f"Prompt {i}, and what of it? " * 3 for i in range(4)]
    sampling = params(max_tokens=120, grammar=GrammarSpec.regex("[a-z]{110,140}"))
    crowded = [output.token_ids for output in small.generate(prompts, sampling)]
    assert small._built.core.scheduler.num_preemptions > 0
    assert crowded == [output.token_ids for output in engine.generate(prompts, sampling)]


@pytest.mark.parametrize("way", WAYS)
def test_late_masks_change_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """No step waits for a mask, and every other one does not even look: some are in vain, the tokens are the same."""
    sampling = params(n=2, **WAYS[way])
    in_time = ids(engine, sampling)
    looks, run, in_vain = itertools.count(), engine._built.runner.run, 0

    def seldom(*args: Any, **more: Any) -> None:
        if next(looks) % 2:
            grammar_process.collect_masks(*args, **more)

    def counted(plan: StepPlan) -> StepResult:
        nonlocal in_vain
        result = run(plan)
        pairs = zip(plan.items, result.items, strict=True)
        in_vain += sum(item.sample is not None and not one.token for item, one in pairs)
        return result

    monkeypatch.setattr(grammar_process, "UNSHARED_WAIT_FACTOR", 0)
    monkeypatch.setattr(engine_module, "collect_masks", seldom)
    monkeypatch.setattr(engine._built.runner, "run", counted)
    assert ids(engine, sampling) == in_time
    assert in_vain > 0


@pytest.mark.parametrize(
    ("given", "text", "reason", "stop_reason"),
    [
        ({}, "abcdef", "stop", None),
        ({"min_tokens": 10}, "abcdef", "stop", None),
        ({"ignore_eos": True}, "abcdef", "stop", None),
        ({"stop": ["cd"]}, "ab", "stop", "cd"),
        ({"stop": ["cd"], "min_tokens": 6}, "abcdef", "stop", None),
        ({"stop_token_ids": [66]}, "ab", "stop", 66),
        ({"stop_token_ids": [66], "min_tokens": 6}, "abcdef", "stop", None),
        ({"max_tokens": 4}, "abcd", "length", None),
        ({"logit_bias": {64: -100.0, 3: 100.0}}, "abcdef", "stop", None),
        ({"logit_bias": {64: False, 65: False, 3: 100.0}}, "abcdef", "stop", None),
    ],
)
def test_how_it_ends(engine: Engine, given: dict[str, Any], text: str, reason: str, stop_reason: Any) -> None:
    output = engine.generate("x", params(grammar=GrammarSpec.regex("abcdef"), **given))[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text, FinishReason(reason), stop_reason)


def test_an_end_only_where_the_text_may_end(engine: Engine) -> None:
    eos = engine.model.eos_token_ids[0]
    eager = {"grammar": GrammarSpec.regex("a{3,200}"), "logit_bias": {eos: 100.0}}
    for given, length in (({}, 3), ({"min_tokens": 9}, 9), ({"ignore_eos": True}, 200)):
        output = engine.generate("x", params(**eager, **given))[0].outputs[0]
        assert (output.text, output.finish_reason) == ("a" * length, FinishReason.STOP)


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    sampling = params(grammar=GrammarSpec.choice(["q"]), logprobs=0)
    constrained = engine.generate("x", sampling)[0].outputs[0]
    logits = engine.logits([*engine._prompt_ids("x")])[-1]
    assert constrained.logprobs is not None
    assert constrained.logprobs[0].logprob == pytest.approx(
        float(logits.log_softmax(0)[constrained.token_ids[0]]), abs=1e-4
    )


def test_no_special_token_is_text(engine: Engine) -> None:
    for output in texts(engine, GrammarSpec.regex("[<|_a-z>]{30}"), n=8, logit_bias={256: 100.0, 257: 100.0}):
        assert not {256, 257, 258} & set(output.token_ids)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_grammar_harms_those_who_use_it_and_nobody_else(engine: Engine) -> None:
    spec = GrammarSpec.regex("[a-z]{300}")
    free = params(grammar=None, max_tokens=80)
    alone = ids(engine, free)
    grammars = engine._built.core.grammars
    assert grammars is not None
    grammars.prepare(GrammarSpec.regex("x")).result()
    forkserver = grammars._forkserver._process.pid  # type: ignore[union-attr]
    before = set(_children(forkserver))
    victim, neighbour = engine.stream("x", params(grammar=spec)), engine.stream("Say something:", free)
    got = [token for _ in range(5) for token in next(neighbour).token_ids]
    next(victim)
    (child,) = set(_children(forkserver)) - before
    os.kill(child, signal.SIGKILL)
    with pytest.raises(InvalidRequest) as refused:
        list(victim)
    assert refused.value.code == "grammar_too_complex"
    assert [[*got, *(token for delta in neighbour for token in delta.token_ids)]] == alone
    with pytest.raises(InvalidRequest):  # for a while nobody tries it again
        ids(engine, params(grammar=spec))


def test_a_lost_forkserver_is_replaced(engine: Engine) -> None:
    grammars = engine._built.core.grammars
    assert grammars is not None
    stream = engine.stream("x", params())
    begun = list(next(stream).token_ids)
    forkserver = grammars._forkserver
    assert forkserver is not None
    forkserver._process.kill()
    forkserver._process.wait()
    found = engine.generate("x", params(grammar=GrammarSpec.regex("new one")))[0]
    assert found.text == "new one"
    assert [*begun, *(token for delta in stream for token in delta.token_ids)] == ids_of(engine, "x", params())


def ids_of(engine: Engine, prompt: str, sampling: SamplingParams) -> list[int]:
    return engine.generate(prompt, sampling)[0].token_ids


def test_without_the_library_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = make_engine(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match="xgrammar") as refused:
        bare.generate("x", params())
    assert refused.value.code == "structured_output_unavailable"


def test_an_ended_sequence_leaves_its_process(engine: Engine) -> None:
    spec = GrammarSpec.regex("[a-z]{200}")
    stream = engine.stream("x", params(grammar=spec))
    next(stream)
    process = engine._built.core.grammars.prepare(spec).result()  # type: ignore[union-attr]
    assert len(process._matchers) == 1
    stream.close()
    assert not process._matchers
