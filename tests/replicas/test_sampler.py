from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from motley.replicas.errors import InvalidRequest
from motley.replicas.execution.philox import philox4x32, uniform
from motley.replicas.execution.sampler import _wide_nucleus, adjust_logits, sample
from motley.replicas.execution.step_plan import SampleSpec
from motley.replicas.sampling_params import TokenIds
from motley.replicas.types import SamplingParams


def spec(
    position: int = 0, seed: int = 1, choice: int = 0, suppressed=(), prompt=(), output=(), **params
) -> SampleSpec:
    params.setdefault("temperature", 1.0)
    return SampleSpec(SamplingParams(seed=seed, **params), seed, choice, position, suppressed, prompt, output)


def draw(logits: list[float], n: int = 2000, **params) -> dict[int, float]:
    """Observed frequency of each token over n positions."""
    rows = torch.tensor([logits] * n)
    tokens = [result.token.token_id for result in sample(rows, [spec(i, **params) for i in range(n)]) if result.token]
    return {token: tokens.count(token) / n for token in sorted(set(tokens))}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers published with Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected) -> None:
    assert philox4x32(counter, key) == expected


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127), st.integers(0, 2**31))
def test_uniform_is_in_range_and_repeats(seed: int, choice: int, position: int) -> None:
    value = uniform(seed, choice, position)
    assert 0 <= value < 1
    assert value == uniform(seed, choice, position)
    assert value != uniform(seed, choice + 1, position)
    assert value != uniform(seed, choice, position + 1)
    assert value != uniform(seed + 1 if seed < 2**63 - 1 else 0, choice, position)


def test_frequencies_follow_the_distribution() -> None:
    probs = [0.5, 0.3, 0.15, 0.05]
    seen = draw([math.log(p) for p in probs], n=8000)
    assert seen == pytest.approx(dict(enumerate(probs)), abs=0.02)


def test_temperature_flattens_and_sharpens() -> None:
    logits = [1.0, 0.0]
    assert draw(logits, temperature=0.1)[0] > 0.99
    assert draw(logits, temperature=100.0)[0] < 0.55
    assert draw(logits, temperature=1e-300) == {0: 1.0}
    assert draw([0.0, 5.0, 5.0], temperature=0.0) == {1: 1.0}


def test_filters_keep_what_they_should() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(draw(logits, top_k=2)) == {0, 1}
    assert set(draw(logits, top_p=0.69)) == {0, 1}
    assert set(draw(logits, top_p=0.71)) == {0, 1, 2}
    assert set(draw(logits, top_p=1e-9)) == {0}
    assert set(draw(logits, min_p=0.51)) == {0, 1}
    assert set(draw(logits, top_k=-1)) == {0, 1, 2, 3}


@pytest.mark.slow("4000 draws, each from a nucleus of half of 4096 tokens")
def test_a_nucleus_wider_than_the_candidates_is_found() -> None:
    seen = draw([0.0] * 4096, n=4000, top_p=0.5)
    assert len(seen) > 1024
    assert max(seen) < 4096


@settings(deadline=None, max_examples=50)
@given(
    levels=st.lists(st.integers(1, 40), min_size=4, max_size=4),
    top_p=st.floats(0.05, 0.999),
    seed=st.integers(0, 2**32),
)
def test_buckets_find_the_nucleus_that_sorting_finds(levels: list[int], top_p: float, seed: int) -> None:
    """There are many ties: only four different weights, whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor(levels, dtype=torch.float32)[torch.randint(0, 4, (200,), generator=generator)]
    target = top_p * float(weights.double().sum())
    values = weights.sort(descending=True).values
    kept = values[values.double().cumsum(0) - values.double() < target]
    found = weights[_wide_nucleus(weights, target)].sort(descending=True).values
    assert torch.equal(found, kept)


def test_penalties() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    out = adjust_logits(logits, spec(repetition_penalty=2.0, prompt=(1,), output=(0,)))
    assert out.tolist() == [1.0, -4.0, 1.0, 0.5]
    out = adjust_logits(logits, spec(presence_penalty=0.5, frequency_penalty=0.25, prompt=(2,), output=(0, 0, 3)))
    assert out.tolist() == [1.0, -2.0, 1.0, -0.25]
    out = adjust_logits(logits, spec(logit_bias={1: 10.0, 3: -1.0}))
    assert out.tolist() == [2.0, 8.0, 1.0, -0.5]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]


def test_an_id_whose_bias_is_false_is_never_chosen() -> None:
    """Not even where the others are far below, or a temperature makes all alike."""
    assert adjust_logits(torch.tensor([300.0, 1.0]), spec(logit_bias={0: False, 1: 2.0})).tolist() == [-torch.inf, 3.0]
    assert draw([300.0, 1.0, 1.0], n=100, logit_bias={0: False}, temperature=100.0).keys() == {1, 2}
    assert draw([300.0, 1.0, 2.0], n=1, logit_bias={0: False}, temperature=0.0) == {2: 1.0}
    with pytest.raises(InvalidRequest, match="logit_bias: False is not accepted; expected a token at least"):
        SamplingParams(logit_bias={0: False, 1: False}).check_vocabulary(2)


def test_suppressed_ids_are_never_chosen() -> None:
    assert draw([9.0, 1.0, 1.0], n=100, suppressed=(0,)).keys() == {1, 2}
    assert draw([9.0, 1.0, 2.0], n=1, suppressed=(0,), temperature=0.0) == {2: 1.0}


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    token = sample(logits, [spec(temperature=0.0, logprobs=2, logit_bias={0: 100.0})])[0].token
    reference = torch.log_softmax(logits[0], 0).tolist()
    assert token is not None
    assert token.token_id == 0
    assert token.logprob == pytest.approx(reference[0])
    assert token.top == ((1, pytest.approx(reference[1])), (2, pytest.approx(reference[2])))


def test_a_row_that_is_not_finite_is_a_fault_of_that_row_alone() -> None:
    rows = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [float("inf"), 0.0]])
    results = sample(rows, [spec(temperature=0.0)] * 3)
    assert [result.fault is None for result in results] == [True, False, False]
    assert results[0].token is not None
    assert results[0].token.token_id == 1


rows = st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=8)
options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.integers(0, 9),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
    },
)


@settings(deadline=None)
@given(batch=st.lists(st.tuples(rows, options, st.integers(0, 2**63 - 1)), min_size=1, max_size=5))
def test_neighbours_never_change_a_row(batch: list[tuple]) -> None:
    logits = torch.tensor([row for row, _, _ in batch])
    specs = [spec(position=3, seed=seed, output=(1, 2), prompt=(3,), **params) for _, params, seed in batch]
    together = [result.token for result in sample(logits, specs)]
    alone = [sample(logits[i : i + 1], [specs[i]])[0].token for i in range(len(specs))]
    assert together == alone


def test_allowed_ids_are_made_a_mask_once_for_all_rows_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a tuple of 65,536 ids takes longer than a step beside it may."""
    others = vars(TokenIds)["others"]
    make, made = others.func, list[TokenIds]()
    monkeypatch.setattr(others, "func", lambda ids: made.append(ids) or make(ids))
    allowed = range(0, 65_536, 2)
    params = SamplingParams(temperature=0.0, seed=0, allowed_token_ids=[*allowed])
    logits = torch.randn(2, 65_536)
    specs = [SampleSpec(params, 0, choice, 0, (), (), ()) for choice in range(2)]
    for _ in range(2):
        tokens = [result.token.token_id for result in sample(logits, specs) if result.token]
        assert tokens == [2 * int(row[::2].argmax()) for row in logits]
    assert len(made) == 1
    assert params.allowed_token_ids == tuple(allowed), "a tuple, for all others"
