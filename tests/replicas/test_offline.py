from __future__ import annotations

from typing import Any

import pytest
import torch

from motley.replicas.demo import demo_path
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import InvalidRequest
from motley.replicas.types import SamplingParams

SHORT = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(demo_path())


def test_text_and_ids_and_lists_of_both(engine: Engine) -> None:
    ids = engine.generate("A class", SHORT)[0].prompt_ids
    outputs = engine.generate(["A class", ids], SHORT)
    assert outputs[0].token_ids == outputs[1].token_ids == engine.generate(ids, SHORT)[0].token_ids
    assert [output.finish_reason for output in outputs] == ["length", "length"]
    assert engine.generate([], SHORT) == []


def test_without_sampling_the_checkpoint_decides(engine: Engine) -> None:
    """The demo's generation_config.json says do_sample false."""
    assert engine.sampling(max_tokens=4) == SHORT
    assert engine.sampling(temperature=0.5).temperature == 0.5
    assert engine.generate("A class")[0].token_ids[:4] == engine.generate("A class", SHORT)[0].token_ids


@pytest.mark.parametrize("prompts", [5, None, b"x", ["a", 5], [["x"]], [[True]], [[]], "", [1.5], {"a": 1}])
def test_prompts_of_other_types_are_refused(engine: Engine, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        engine.generate(prompts, SHORT)


def test_output_ids_and_settings_of_other_kinds_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="output_ids"):
        engine.generate("a", SHORT, output_ids=[["x"]])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="output_ids"):
        engine.generate("a", SHORT, output_ids=[[1], [2]])
    with pytest.raises(InvalidRequest, match="max_batch_size: no such setting"):
        Engine(demo_path(), max_batch_size=3)


def test_more_tokens_at_least_than_there_is_room_for(engine: Engine) -> None:
    room = engine.model.max_model_len - 3
    for asked in ({"min_tokens": room + 1}, {"min_tokens": room + 1, "max_tokens": 10 * room}):
        with pytest.raises(InvalidRequest, match=f"min_tokens: {room + 1} is not accepted; expected at most {room}"):
            engine.generate([1, 2, 3], SamplingParams(temperature=0.0, **asked))


def test_logits_of_every_position(engine: Engine) -> None:
    ids = engine.generate("The with statement", SHORT)[0].prompt_ids
    logits = engine.logits(ids)
    assert logits.shape == (len(ids), engine.model.vocab_size)
    assert logits.dtype == torch.float32
    assert int(logits[-1].argmax()) == engine.generate(ids, SHORT)[0].token_ids[0]
    assert torch.equal(engine.logits(torch.tensor(ids)), logits)  # type: ignore[arg-type]
    for bad in ("", [], [10**6]):
        with pytest.raises(InvalidRequest, match="prompt"):
            engine.logits(bad)  # type: ignore[arg-type]


def test_closing_a_stream_frees_its_kv(engine: Engine) -> None:
    stream = engine.stream("A class", SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    engine._built.core.scheduler.pool.check(idle=True)
