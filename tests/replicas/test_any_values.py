"""Whatever a caller gives: an object within its bounds, or InvalidRequest naming a field that there is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from any_values import ANY, GIVEN, SAMPLING, VALID, Mute, outside, refusal_of
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.streams.admission_limiter import MAX_RETRY_AFTER_S, AdmissionLimiter
from motley.replicas.errors import Overloaded
from motley.replicas.execution.sampler import sample
from motley.replicas.execution.step_plan import SampleSpec
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import Request

VOCABULARY, CONTEXT = 259, 64
LIMITS = ModelLimits(VOCABULARY, CONTEXT, (258,))


def made(fields: dict[str, Any]) -> SamplingParams | None:
    """None: they were refused as they should be."""
    params, refusal = refusal_of(lambda: SamplingParams(**fields))
    if refusal is not None:
        assert refusal.param in fields, "the field at fault is one of those that were given"
        assert refusal.param in SAMPLING
        assert refusal.code == "invalid_value"
        assert refusal.message.startswith(f"{refusal.param}: ")
        assert len(refusal.message) < 400
    return params


@pytest.mark.slow("200 drawn sets of sampling fields, whose values may be anything")
@given(fields=GIVEN)
@settings(max_examples=200, derandomize=True)
@example({"n": 10**5000})
@example({"logit_bias": {"1": 1.0, "01": 2.0}})
@example({"stop": Mute()})
def test_sampling_params(fields: dict[str, Any]) -> None:
    params = made(fields)
    if params is not None:
        assert outside(params) == []
        assert replace(params) == params
        biases = fields.get("logit_bias") or {}
        assert len(params.logit_bias) == len(biases), "none is lost for another"


IDS = st.lists(st.integers(-1, VOCABULARY) | ANY, max_size=4) | st.lists(st.integers(0, 258), max_size=CONTEXT + 2)


@given(prompt=IDS, output=IDS, fields=VALID)
@settings(max_examples=150, derandomize=True)
@example([True], [], {})
@example([1.0], [], {})
@example([1], [2.0], {})
@example([10**5000], [], {})
def test_limits(prompt: list[Any], output: list[Any], fields: dict[str, Any]) -> None:
    assume(prompt)
    params = SamplingParams(**fields)
    request = Request("any", tuple(prompt), params, (tuple(output),) * params.n)
    _, refusal = refusal_of(lambda: LIMITS.check(request))
    if refusal is not None:
        assert refusal.param in {"prompt", "output_ids", *SAMPLING}
        assert len(refusal.message) < 400
        return
    assert all(type(token) is int and 0 <= token < VOCABULARY for token in (*prompt, *output))
    assert len(prompt) < CONTEXT
    assert len(prompt) + max(len(output), params.min_tokens) <= CONTEXT
    assert all(token < VOCABULARY for token in (*params.stop_token_ids, *params.logit_bias))


@given(fields=VALID, scale=st.sampled_from([0.0, 1.0, 40.0]), seed=st.integers(0, 99))
@settings(max_examples=100, derandomize=True)
@example({"top_p": 5e-324, "top_k": 50, "temperature": 100.0}, 0.0, 1)
@example({"repetition_penalty": 1e-320}, 1.0, 1)
def test_a_token_is_drawn_whatever_is_accepted(fields: dict[str, Any], scale: float, seed: int) -> None:
    params = SamplingParams(**fields)
    logits = scale * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    [result] = sample(logits, [SampleSpec(params, seed, 0, 0, (), (0, 1), (2, 3))])
    assert result.fault is None
    assert result.token is not None
    assert 0 <= result.token.token_id < VOCABULARY


def test_tiny_penalties_leave_no_other_token() -> None:
    logits = torch.tensor([[5.0, 4.0] + [0.0] * 300])
    params = SamplingParams(repetition_penalty=1e-320)
    specs = [SampleSpec(params, seed, 0, 0, (), (0, 1), ()) for seed in range(20)]
    tokens = {result.token.token_id for result in sample(logits.repeat(20, 1), specs) if result.token}
    assert tokens <= {0, 1}


STEPS = st.lists(st.tuples(st.sampled_from(["enter", "began", "left"]), st.integers(1, 200)), max_size=60)


@given(steps=STEPS, most=st.integers(0, 8), tokens=st.integers(0, 300), rate=st.sampled_from([0.0, 1e-9, 50.0, 1e12]))
def test_admission(steps: list[tuple[str, int]], most: int, tokens: int, rate: float) -> None:
    """Counts are those of who waits, bounded, and a refusal says when to come again."""
    now = 0.0
    admission = AdmissionLimiter(
        max_waiting=most, max_waiting_tokens=tokens, prefill_tokens_per_s=rate, clock=lambda: now
    )
    waiting: list[int] = []
    for step, size in steps:
        now += 1.0
        if step == "enter":
            if len(waiting) >= most or (waiting and sum(waiting) + size > tokens):
                with pytest.raises(Overloaded) as caught:
                    admission.enter(size)
                assert 1 <= (caught.value.retry_after_s or 0) <= MAX_RETRY_AFTER_S
            else:
                admission.enter(size)
                waiting.append(size)
        elif waiting:
            getattr(admission, step)(waiting.pop())
        assert (admission.waiting, admission.waiting_tokens) == (len(waiting), sum(waiting))
        assert not math.isnan(admission.retry_after_s())
