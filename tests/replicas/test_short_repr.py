"""Quoting strangers' values: short, whatever they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.replicas.short_repr import MAX_REPR_CHARS, first_duplicate, short_repr

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow("Hypothesis draws 100 nested values of every type in JSON")
@given(JSON)
def test_small_values_are_quoted_as_they_are(value: Any) -> None:
    assert len(short_repr(value)) <= MAX_REPR_CHARS
    if not isinstance(value, list | dict) and len(repr(value)) <= 40:
        assert short_repr(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [[0] * 1_000_000, dict.fromkeys(range(500_000)), "x" * 1_000_000, [[[[[[0]]]]]], {"a": {"b": {"c": {"d": 1}}}}],
)
def test_large_values_are_cut(value: Any) -> None:
    assert "..." in short_repr(value)
    assert len(short_repr(value)) <= MAX_REPR_CHARS


def test_integers_that_python_does_not_write_out() -> None:
    assert short_repr(10**5000) == "an integer of 16610 bits"
    assert short_repr([-(10**5000)]) == "[an integer of 16610 bits]"


def test_a_dict_keeps_its_order() -> None:
    assert short_repr({"b": 1, "a": None}) == "{'b': 1, 'a': None}"


@given(st.lists(st.integers(0, 20)))
def test_the_first_double(names: list[int]) -> None:
    found = first_duplicate(names)
    assert (found is None) == (len(set(names)) == len(names))
    if found is not None:
        second = names.index(found, names.index(found) + 1)
        assert len(set(names[:second])) == second, "none was double before"


def test_the_first_double_of_many_fields() -> None:
    """Asked of every name in turn, a body of this size would take minutes."""
    pairs = json.loads(
        '{"k":0,' + ",".join(f'"k{i}":0' for i in range(300_000)) + ',"z":0,"z":1}', object_pairs_hook=list
    )
    assert first_duplicate(name for name, _ in pairs) == "z"
