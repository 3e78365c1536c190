"""Of a schema that cannot be kept to as it is, everything is kept that can be, and what is left out is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.replicas.grammar_keywords import KEYWORDS
from motley.replicas.grammar_loose import MAX_REPAIRS, loosened
from motley.replicas.grammar_schema import MAX_NODES, check_schema

INT32 = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT = {"type": "string"}
KEPT: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "int32": (of(a={"type": "integer", "format": "int32"}), of(a=INT32), []),
    "a format that is not known": (
        of(a={**TEXT, "format": "isbn"}, b=TEXT), of(a=TEXT, b=TEXT), ["#/properties/a: 'format'"],
    ),
    "annotations": (
        {**of(a={**TEXT, "title": "A", "default": "x", "examples": ["x"], "deprecated": True, "readOnly": True,
                 "contentEncoding": "base64", "x-order": 1, "format": "password", "nullable": False}),
         "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T"},
        of(a=TEXT), [],
    ),
    "nullable": (of(a={**TEXT, "nullable": True}), of(a={"anyOf": [TEXT, {"type": "null"}]}), []),
    "nothing else may come": (of(a={"not": {"type": "null"}}), of(a={}), ["#/properties/a: 'not'"]),
    "a set": (
        of(a={"type": "array", "items": TEXT, "uniqueItems": True}), of(a={"type": "array", "items": TEXT}),
        ["#/properties/a: 'uniqueItems'"],
    ),
    "conditions": (
        {**of(a=TEXT), "if": {}, "then": {}, "else": {}, "dependentRequired": {}, "unevaluatedProperties": False},
        of(a=TEXT), [f"#: {name!r}" for name in ("if", "then", "else", "dependentRequired", "unevaluatedProperties")],
    ),
    "one of two required": (
        {**of(a=TEXT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, of(a=TEXT), ["#: 'anyOf'"],
    ),
    "members that may be one": (
        of(a={"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        of(a={"anyOf": [{"type": "integer"}, {"type": "number"}]}), ["#/properties/a: 'oneOf'"],
    ),
    "all of two": (
        {"allOf": [{"$ref": "#/$defs/base"}, of(b=TEXT)], "$defs": {"base": of(a={"type": "integer"})}},
        of(a={"type": "integer"}, b=TEXT), [],
    ),
    "required and not described": (
        {"type": "object", "required": ["a"], "properties": {"b": TEXT}},
        {"type": "object", "required": ["a"], "properties": {"b": TEXT, "a": True}, "x-which": 1}, [],
    ),
    "properties that are none": (
        {"type": "object", "required": ["a"], "properties": 5}, {**of(a=True)}, ["#: 'properties'"],
    ),
    "a reference elsewhere": (of(a={"$ref": "https://x/y"}, b=TEXT), of(a={}, b=TEXT), ["#/properties/a: '$ref'"]),
    "a pattern": (
        of(a={**TEXT, "pattern": "a(?=b)"}), of(a=TEXT), ["#/properties/a: 'pattern'"],
    ),
    "a type of another language": (of(a={"type": "str"}, b=TEXT), of(a={}, b=TEXT), ["#/properties/a: 'type'"]),
    "an enum with null": (of(a={**TEXT, "enum": ["x", None]}), of(a={"enum": ["x", None]}), ["#/properties/a: 'type'"]),
    "bounds that leave nothing": (
        of(a={"type": "integer", "minimum": 3, "maximum": 2, "multipleOf": 5}),
        of(a={"type": "integer", "multipleOf": 5}),
        ["#/properties/a: 'minimum'", "#/properties/a: 'maximum'"],
    ),
    "an object of which nothing is said": (
        of(a={"type": "object"}), of(a={"type": "object", "additionalProperties": True}), [],
    ),
    "a schema that is none": (of(a="text", b=TEXT), of(a=True, b=TEXT), ["#/properties/a: 'the schema'"]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_can_be_kept_is(name: str) -> None:
    given_schema, kept, dropped = KEPT[name]
    before = json.dumps(given_schema)
    assert loosened(given_schema) == (kept, dropped)
    assert json.dumps(given_schema) == before, "the client's own schema is what the model is shown"


def test_what_can_be_kept_to_is_kept_as_it_is() -> None:
    schema = {
        "$defs": {"a": of(b={"type": "string", "format": "date", "maxLength": 10})},
        **of(a={"$ref": "#/$defs/a"}),
    }
    assert loosened(schema) == (check_schema(schema, "x"), [])


@pytest.mark.parametrize(
    "schema",
    [
        {**of(a=TEXT, b=TEXT), "$defs": {f"d{i}": {"$ref": "#/none"} for i in range(MAX_REPAIRS + 5)}},
        of(**{"a": TEXT, "b": {"anyOf": [{}] * (MAX_NODES + 5)}}),
    ],
    ids=["too many repairs", "too many schemas"],
)
def test_names_are_kept_of_what_is_too_much(schema: dict[str, Any]) -> None:
    kept, dropped = loosened(schema)
    assert list(kept["properties"]) == kept["required"] == ["a", "b"]
    assert dropped


WORDS = st.sampled_from(["string", "object", "array", "#", "#/$defs/a", "a", "(a", "date"])
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted(KEYWORDS | {"not", "$defs", "nullable"})) | WORDS, inner, max_size=4)
    ),
    max_leaves=10,
)


@given(schema=st.dictionaries(st.sampled_from(["type", "properties", "required", "allOf", "$defs", "$ref"]), ANYTHING))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_schema_is_loosened_to_one_that_is_accepted(schema: dict[str, Any]) -> None:
    kept, _ = loosened(schema)
    assert isinstance(kept, dict | bool)
    required = schema.get("required")
    if isinstance(kept, dict) and "properties" in kept and isinstance(required, list) and "allOf" not in schema:
        assert {name for name in required if isinstance(name, str)} <= set(kept["properties"])
