"""Values of every type for every field of a request, and what may have been accepted of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.sampling_params import SEED_RANGE, SamplingParams

SAMPLING = tuple(field.name for field in fields(SamplingParams))
INT32 = 2**31 - 1


class Mute:
    """Has no words for itself."""

    def __repr__(self) -> str:
        raise RuntimeError


EDGES = (0, 1, -1, 2, -2, 19, 20, 21, 100, 101, 127, 128, 129, 300, INT32, INT32 + 1, 2**63 - 1, 2**63, 2**64, -(2**63))
LONG = st.integers(300, 5000).map(lambda digits: 10**digits)  # Python writes out no more than 4,300 digits
INTEGERS = st.sampled_from(EDGES) | st.integers() | LONG | LONG.map(lambda value: -value)
TEXTS = st.sampled_from(["", "a", "NaN", "1", "\ud800", "\0", "x" * 1025]) | st.text(max_size=4)
ODD = st.sampled_from(
    [Decimal(1), Fraction(1, 2), 1j, range(3), object, frozenset({1}), b"a", bytearray(b"a")]
) | st.builds(Mute)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats() | TEXTS | ODD
ANY: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(INTEGERS | TEXTS | st.booleans() | st.none(), inner, max_size=3)
    ),
    max_leaves=5,
)


def real(low: float, high: float) -> st.SearchStrategy[float]:
    """Within these; of few digits as people write them, or any."""
    few = st.integers(round(low * 1000), round(high * 1000)).map(lambda value: value / 1000)
    return few | st.floats(low, high) | st.sampled_from([low, high, int(high)])


TINY = st.sampled_from([5e-324, 1e-320, 1e-40, 1e-30])
SMALL = st.integers(0, 20)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "temperature": real(0, 100) | TINY,
    "top_k": st.integers(-1, INT32),
    "top_p": real(0.001, 1) | TINY,
    "min_p": real(0, 1) | TINY,
    "presence_penalty": real(-2, 2),
    "frequency_penalty": real(-2, 2),
    "repetition_penalty": real(0.001, 10) | TINY,
    "logit_bias": st.dictionaries(st.integers(0, 258), real(-100, 100), max_size=3),
    "seed": st.none() | st.integers(*SEED_RANGE),
    "n": st.integers(1, 128),
    "logprobs": st.none() | SMALL,
    "prompt_logprobs": st.none() | SMALL,
    "min_tokens": SMALL,
    "max_tokens": st.none() | st.integers(20, INT32),
    "stop": st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=4).map(tuple),
    "stop_token_ids": st.lists(st.integers(0, 258), max_size=3).map(tuple),
    "ignore_eos": st.booleans(),
    "grammar": st.none() | st.just(GrammarSpec.regex("a+")),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "allowed_token_ids": st.lists(st.integers(0, 258), max_size=3).map(tuple),
    "bad_words": st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=3).map(tuple),
}
assert set(GOOD) == set(SAMPLING)


def _together(fields: dict[str, Any]) -> dict[str, Any]:
    """A grammar alone says which tokens are allowed."""
    return fields | {"allowed_token_ids": ()} if fields.get("grammar") is not None else fields


VALID = st.fixed_dictionaries({}, optional=GOOD).map(_together)


@st.composite
def given_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Valid ones, and at most two of anything."""
    odd = draw(st.lists(st.sampled_from(SAMPLING), max_size=2))
    return draw(VALID) | {name: draw(ANY) for name in odd}


GIVEN = given_fields()


def refusal_of(action: Callable[[], Any]) -> tuple[Any, InvalidRequest | None]:
    """Return what the call returns, or how it refuses; any other exception fails the test."""
    try:
        return action(), None
    except InvalidRequest as refusal:
        return None, refusal


def is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def is_integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def outside(params: SamplingParams) -> list[str]:
    """Fields whose values are not what the class tells of them."""
    p = params
    holds = {
        "temperature": is_number(p.temperature, 0, 100),
        "top_k": is_integer(p.top_k, -1, INT32),
        "top_p": is_number(p.top_p, 0, 1) and p.top_p > 0,
        "min_p": is_number(p.min_p, 0, 1),
        "presence_penalty": is_number(p.presence_penalty, -2, 2),
        "frequency_penalty": is_number(p.frequency_penalty, -2, 2),
        "repetition_penalty": is_number(p.repetition_penalty, 0, 10) and p.repetition_penalty > 0,
        "logit_bias": type(p.logit_bias) is dict
        and len(p.logit_bias) <= 300
        and all(is_integer(k, 0, INT32) and (v is False or is_number(v, -100, 100)) for k, v in p.logit_bias.items()),
        "seed": p.seed is None or is_integer(p.seed, *SEED_RANGE),
        "n": is_integer(p.n, 1, 128),
        "logprobs": p.logprobs is None or is_integer(p.logprobs, 0, 20),
        "prompt_logprobs": p.prompt_logprobs is None or is_integer(p.prompt_logprobs, 0, 20),
        "min_tokens": is_integer(p.min_tokens, 0, INT32 if p.max_tokens is None else p.max_tokens),
        "max_tokens": p.max_tokens is None or is_integer(p.max_tokens, 1, INT32),
        "stop": type(p.stop) is tuple
        and len(p.stop) <= 4
        and all(isinstance(text, str) and 1 <= len(text) <= 1024 and text.encode() for text in p.stop),
        "stop_token_ids": type(p.stop_token_ids) is tuple
        and len(p.stop_token_ids) <= 300
        and all(is_integer(token, 0, INT32) for token in p.stop_token_ids),
        "ignore_eos": type(p.ignore_eos) is bool,
        "grammar": p.grammar is None or isinstance(p.grammar, GrammarSpec),
        "skip_special_tokens": type(p.skip_special_tokens) is bool,
        "include_stop_str_in_output": type(p.include_stop_str_in_output) is bool,
        "allowed_token_ids": isinstance(p.allowed_token_ids, tuple)
        and len(p.allowed_token_ids) <= (65_536 if p.grammar is None else 0)
        and all(is_integer(token, 0, INT32) for token in p.allowed_token_ids),
        "bad_words": type(p.bad_words) is tuple
        and len(p.bad_words) <= 100
        and all(isinstance(text, str) and 1 <= len(text) <= 256 and text.encode() for text in p.bad_words),
    }
    assert set(holds) == set(SAMPLING)
    return [name for name, good in holds.items() if not good]
