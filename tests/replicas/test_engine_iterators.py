"""Several iterators on one engine: each gets all of its own, whoever steps."""

from __future__ import annotations

import gc

import pytest
import torch

from motley.replicas.demo import demo_path
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import InvalidRequest
from motley.replicas.types import Delta, FinishReason, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ("The with statement", "A class", "In Python")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(demo_path(), max_model_len=256)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[str]:
    return [engine.generate(prompt, LONG)[0].text for prompt in PROMPTS]


def text(deltas: list[Delta]) -> str:
    assert sum(len(delta.token_ids) for delta in deltas) == 24
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]
    return "".join(delta.text for delta in deltas)


def test_streams_side_by_side(engine: Engine, alone: list[str]) -> None:
    streams = [engine.stream(prompt, LONG) for prompt in PROMPTS]
    deltas = list(zip(*streams, strict=True))
    assert [text(list(each)) for each in zip(*deltas, strict=True)] == alone


def test_streams_read_at_different_speeds(engine: Engine, alone: list[str]) -> None:
    slow, fast = engine.stream(PROMPTS[0], LONG), engine.stream(PROMPTS[1], LONG)
    first = next(slow)
    assert text(list(fast)) == alone[1]
    assert text([first, *slow]) == alone[0]


def test_other_calls_while_a_stream_is_open(engine: Engine, alone: list[str]) -> None:
    logits, vectors = engine.logits(PROMPTS[2]), engine.embed(list(PROMPTS))
    stream = engine.stream(PROMPTS[0], LONG)
    deltas = [next(stream)]
    assert [output.text for output in engine.generate(list(PROMPTS), LONG)] == alone
    deltas.append(next(stream))
    assert torch.equal(engine.embed(list(PROMPTS)), vectors)
    deltas.append(next(stream))
    assert torch.equal(engine.logits(PROMPTS[2]), logits)
    assert text([*deltas, *stream]) == alone[0]


def test_a_stream_within_a_stream(engine: Engine, alone: list[str]) -> None:
    outer = []
    for delta in engine.stream(PROMPTS[0], LONG):
        outer.append(delta)
        if len(outer) in (3, 9):
            assert text(list(engine.stream(PROMPTS[1], LONG))) == alone[1]
    assert text(outer) == alone[0]


def test_a_stream_left_half_read_hinders_nobody(engine: Engine, alone: list[str]) -> None:
    left, closed = engine.stream(PROMPTS[0], LONG), engine.stream(PROMPTS[1], LONG)
    next(left), next(closed)
    closed.close()
    assert [output.text for output in engine.generate(list(PROMPTS), LONG)] == alone
    del left
    gc.collect()
    engine._built.core.scheduler.pool.check(idle=True)
    assert not engine._built.core.busy
    assert not engine._turns._unread


def test_a_stream_collected_while_another_steps(engine: Engine, alone: list[str], monkeypatch, request) -> None:
    """The collector may run in the middle of a step, and closes what nobody holds."""
    gc.freeze()  # what was there before is not walked at every step
    request.addfinalizer(gc.unfreeze)
    core, circle = engine._built.core, []
    circle += [circle, engine.stream(PROMPTS[1], LONG)]
    next(circle[1])
    del circle
    run = core._runner.run

    def collecting(plan):
        gc.collect()
        return run(plan)

    monkeypatch.setattr(core._runner, "run", collecting)
    assert text(list(engine.stream(PROMPTS[0], LONG))) == alone[0]
    core.scheduler.pool.check(idle=True)
    assert not core.busy


def test_a_refused_request_leaves_the_others_alone(engine: Engine, alone: list[str]) -> None:
    stream = engine.stream(PROMPTS[0], LONG)
    deltas = [next(stream)]
    with pytest.raises(InvalidRequest, match="prompt"):
        engine.generate(["A class", [10**6]], LONG)
    assert text([*deltas, *stream]) == alone[0]
