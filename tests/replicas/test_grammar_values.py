"""Which values a schema takes, one by one, against a validator of JSON Schema: the same wherever it stands."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from byte_grammars import ByteGrammar

from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.grammar.schema.keywords import TYPE_KEYWORDS

VALUES: list[Any] = [
    "a", "abc", None, True, 0, 7, -3, 2.5, [], [1], ["a"], ["a", 1], ["a", 1, {}], [[1]], [{"a": 1}], {}, {"a": 1},
    {"a": "x"}, {"b": {"a": [1]}}, {"a": 1, "b": None},
]  # fmt: skip
INTEGER = {"type": "integer"}
TEXT = {"type": "string"}


def takes(schema: Any) -> list[Any]:
    """The values that a strict schema lets a model write; what is not strict must let in the same."""
    strict = GrammarSpec.json_schema(schema)
    grammar = ByteGrammar(strict)
    if isinstance(schema, dict):
        loose, lost = GrammarSpec.loose_json_schema(schema)
        assert lost == []
        assert loose.source == strict.source
    return [value for value in VALUES if grammar.takes(value)]


def valid(schema: Any) -> list[Any]:
    validator = jsonschema_rs.Draft202012Validator(schema)
    return [value for value in VALUES if validator.is_valid(value)]


TYPES: list[dict[str, Any]] = [
    {"type": ["array", "string"], "minLength": 2},
    {"type": ["array", "string"], "maxLength": 2},
    {"type": ["array", "string"], "pattern": "^a"},
    {"type": ["array", "integer"], "minimum": 1},
    {"type": ["array", "number"], "exclusiveMinimum": 2},
    {"type": ["array", "number", "integer"], "maximum": 2},
    {"type": ["array", "object"], "maxProperties": 1},
    {"type": ["array", "object"], "maxItems": 1},
    {"type": ["object", "integer"], "minimum": 0},
    {"type": ["object", "string"], "maxLength": 1},
    {"type": ["object", "null", "string"], "additionalProperties": INTEGER, "minLength": 2},
    {"type": ["object", "array"], "items": INTEGER},
    {"type": ["object", "array", "string"], "minItems": 1, "minProperties": 1, "minLength": 2},
    {"type": ["string", "array", "integer"], "prefixItems": [TEXT], "maxLength": 1, "minimum": 1},
    {"type": ["integer", "null", "array"], "multipleOf": 7},
    {"type": ["integer", "string"], "multipleOf": 7, "minimum": 0, "maximum": 70},
    {"type": ["boolean", "array"], "uniqueItems": True, "items": {"enum": [1, "a"]}},
]


@pytest.mark.parametrize("schema", TYPES, ids=str)
def test_each_of_several_types_is_as_if_it_stood_alone(schema: dict[str, Any]) -> None:
    assert takes(schema) == valid(schema)
    alone = [
        takes({"type": name} | {key: value for key, value in schema.items() if key in TYPE_KEYWORDS[name]})
        for name in schema["type"]
    ]
    assert takes(schema) == [value for value in VALUES if any(any(value is one for one in found) for found in alone)]


@pytest.mark.parametrize("name", ["maxLength", "minLength", "pattern", "format"])
@pytest.mark.parametrize("other", ["array", "object"])
def test_what_is_said_of_texts_says_nothing_of_lists_and_objects(other: str, name: str) -> None:
    value = {"maxLength": 9, "minLength": 1, "pattern": "^a", "format": "date"}[name]
    found = takes({"type": [other, "string"], name: value})
    kind = {"array": list, "object": dict}[other]
    assert [one for one in found if not isinstance(one, str)] == [one for one in VALUES if isinstance(one, kind)]


LEAVES: list[Any] = [
    True, {}, *({"type": name} for name in TYPE_KEYWORDS), {"type": ["array", "null"]}, {"type": ["object", "string"]},
    {"const": None}, {"type": "array", "minItems": 1}, {"type": "array", "maxItems": 1},
    {"type": "array", "items": False}, {"type": "array", "items": INTEGER}, {"type": "array", "prefixItems": [TEXT]},
    {"type": "array", "prefixItems": [True, INTEGER]}, {"type": "array", "prefixItems": [True, False]},
    {"type": "array", "prefixItems": [TEXT, INTEGER], "items": False}, {"type": "array", "prefixItems": [False, TEXT]},
    {"type": "array", "prefixItems": [TEXT, True], "minItems": 3, "maxItems": 4},
    {"type": "object", "maxProperties": 1}, {"type": "object", "minProperties": 1},
    {"type": "object", "patternProperties": {"^a": False}, "maxProperties": 0},
    {"type": "object", "propertyNames": {"pattern": "^a"}}, {"type": "object", "propertyNames": True},
    {"type": "object", "propertyNames": False}, {"type": "object", "additionalProperties": {"type": "object"}},
    {"type": "object", "properties": {"a": True, "b": False}, "additionalProperties": True},
    {"anyOf": [False, TEXT, {"type": "array", "items": {"type": "array"}}]},
]  # fmt: skip
PLACES: dict[str, Callable[[Any], tuple[Any, Callable[[Any], Any]]]] = {
    "alone": lambda leaf: (leaf, lambda value: value),
    "by a reference": lambda leaf: ({"$ref": "#/$defs/x", "$defs": {"x": leaf}}, lambda value: value),
    "all of one": lambda leaf: ({"allOf": [leaf]}, lambda value: value),
    "any of one that is possible": lambda leaf: ({"anyOf": [False, leaf]}, lambda value: value),
    "items": lambda leaf: ({"type": "array", "items": leaf}, lambda value: [value]),
    "first item": lambda leaf: ({"type": "array", "prefixItems": [leaf]}, lambda value: [value, 9]),
    "a property": lambda leaf: ({"type": "object", "properties": {"z": leaf}}, lambda value: {"z": value}),
    "any property": lambda leaf: ({"type": "object", "additionalProperties": leaf}, lambda value: {"z": value}),
    "properties by pattern": lambda leaf: (
        {"type": "object", "patternProperties": {"^z": leaf}}, lambda value: {"z": value},
    ),
    "items beside a length of texts": lambda leaf: (
        {"type": ["array", "string"], "maxLength": 2, "items": leaf}, lambda value: [value],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_a_schema_takes_the_same_wherever_it_stands(name: str) -> None:
    for leaf in LEAVES:
        schema, around = PLACES[name](leaf)
        grammar = ByteGrammar(GrammarSpec.json_schema(schema))
        validator = jsonschema_rs.Draft202012Validator(schema)
        for value in map(around, VALUES):
            assert grammar.takes(value) == validator.is_valid(value), (schema, value)


NO_VALUE: dict[str, tuple[Any, str]] = {
    "false": (False, "#: the schema lets in no value"),
    "a reference to false": ({"$ref": "#/$defs/no", "$defs": {"no": False}}, "#: the schema lets in no value"),
    "one of nothing": ({"anyOf": [False, {"allOf": [False]}]}, "#: the schema lets in no value"),
    "a required property": (
        {"type": "object", "properties": {"a": {"anyOf": [False]}}, "required": ["a"]},
        "#: the property 'a' is required",
    ),
    "an item": (
        {"type": "array", "prefixItems": [{}, False], "minItems": 2}, "#: 'minItems' is 2, and the schema of item 1",
    ),
    "one type of several": (
        {"type": ["array", "null"], "items": {"$ref": "#/$defs/no"}, "minItems": 1, "$defs": {"no": False}},
        "#: 'minItems' is 1, and the schema of item 0",
    ),
    "itself": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#: the property 'a' is required",
    ),
    "lists of itself": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#: 'minItems' is 1"),
    "two of each other": (
        {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
         "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                   "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}},
        "#/$defs/a: the property 'b' is required",
    ),
    "a choice of itself": (
        {"$ref": "#/$defs/u", "$defs": {"u": {"anyOf": [{"$ref": "#/$defs/u"}]}}},
        "#/$defs/u: the schema lets in no value",
    ),
    "more required than may be": (
        {"type": "object", "properties": {"p": {}, "q": {}}, "required": ["p", "q"], "maxProperties": 1},
        "#: 'maxProperties' is 1, and 2 properties are required",
    ),
    "fewer names than must be": (
        {"type": "object", "properties": {"a": {}, "b": False}, "minProperties": 2},
        "#: 'minProperties' is 2, and there are 1",
    ),
    "one of its properties": (
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}, "minProperties": 1,
         "additionalProperties": False},
        "#: 'minProperties' is 1, and there are 0",
    ),
    "one property more than those that end": (
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {}, "c": {}}, "minProperties": 3, "required": ["c"]},
        "#: 'minProperties' is 3, and there are 2",
    ),
    "any other property": (
        {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
        "#: 'minProperties' is 1, and there are 0",
    ),
    "any other property beside one that is required": (
        {"type": "object", "properties": {"p": True}, "required": ["p"], "minProperties": 2,
         "additionalProperties": {"$ref": "#/$defs/x"},
         "$defs": {"x": {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}}},
        "#: 'minProperties' is 2, and there are 1",
    ),
    "any other property beside a tag that is always written": (
        {"oneOf": [{"type": "object", "properties": {"p": {"const": 1}}, "additionalProperties": {"$ref": "#"},
                    "minProperties": 2}], "discriminator": {"propertyName": "p"}},
        "#/oneOf/0: 'minProperties' is 2, and there are 1",
    ),
    "a property of a list of names": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"$ref": "#"},
         "minProperties": 1},
        "#: 'minProperties' is 1, and there are 0",
    ),
    "a property of a pattern": (
        {"type": "object", "patternProperties": {"^a": {"$ref": "#"}}, "minProperties": 1},
        "#: 'minProperties' is 1, and there are 0",
    ),
    "fewer names than must be, by a list": (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "minProperties": 2},
        "#: 'minProperties' is 2, and there are 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_VALUE)
def test_what_has_no_value_is_refused_by_name(name: str) -> None:
    schema, why = NO_VALUE[name]
    with pytest.raises(InvalidRequest) as caught:
        GrammarSpec.json_schema(schema, field="schema")
    assert caught.value.message.startswith(f"schema: {why}")
    assert (caught.value.param, caught.value.code) == ("schema", "invalid_grammar")


@pytest.mark.parametrize("name", [name for name in NO_VALUE if name != "false"])
def test_what_has_no_value_is_served_where_it_is_not_strict(name: str) -> None:
    spec, lost = GrammarSpec.loose_json_schema(NO_VALUE[name][0])
    grammar = ByteGrammar(spec)
    assert lost
    assert any(map(grammar.takes, [*VALUES, {"p": 1}, {"p": 1, "q": 2}, {"b": 1, "c": 2}, [[], []]]))


def test_a_circle_with_a_way_out_is_served() -> None:
    schema = {
        "type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"],
    }  # fmt: skip
    grammar = ByteGrammar(GrammarSpec.json_schema(schema))
    assert grammar.takes({"a": {"a": None}})
    assert not grammar.takes({"a": {}})


def test_what_must_have_a_property_may_have_one_that_ends() -> None:
    schema = {
        "type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "null"}}, "minProperties": 1,
        "additionalProperties": {"$ref": "#"},
    }  # fmt: skip
    grammar = ByteGrammar(GrammarSpec.json_schema(schema))
    assert grammar.takes({"a": {"a": {"b": None}}})
    assert not grammar.takes({"a": {}})


def test_a_tag_that_holds_its_own_union_is_not_always_written() -> None:
    """It would hold itself without end."""
    schema = {
        "oneOf": [{"type": "object", "properties": {"k": {"$ref": "#"}}}], "discriminator": {"propertyName": "k"},
    }  # fmt: skip
    grammar = ByteGrammar(GrammarSpec.json_schema(schema))
    assert grammar.takes({"k": {"k": {}}})
    assert grammar.takes({})


# A bound that leaves nothing beside another, a boolean wherever a schema may stand, and values that are none.
BOUNDS: dict[str, list[Any]] = {
    "minLength": [0, 3], "maxLength": [0, 2], "pattern": ["^b$"], "format": ["date", "ipv6", "uuid"],
    "minimum": [5], "maximum": [-1, 7.5], "exclusiveMinimum": [5], "exclusiveMaximum": [0], "multipleOf": [3, 5],
    "minItems": [1, 2, 3], "maxItems": [0, 1], "uniqueItems": [True], "required": [["a"], ["p", "q"]],
    "minProperties": [1, 2, 3], "maxProperties": [0, 1],
    "propertyNames": [
        False, {"enum": ["a"]}, {"enum": [1]}, {"format": "uri-reference"}, {"minLength": 3, "maxLength": 2},
    ],
    "patternProperties": [{"^a": False}, {"^a": True}], "additionalProperties": [False, {"$ref": "#/$defs/no"}],
    "items": [True, False, {"$ref": "#"}], "prefixItems": [[True, TEXT], [False], {"a": False}],
    "properties": [{"a": True, "p": False}, [True]], "anyOf": [[False, TEXT], []], "allOf": [[False], [True, {}]],
    "$ref": ["#", "#/$defs/no"], "enum": [[], ["a", 1]], "nullable": [True],
}  # fmt: skip
AROUND: list[Callable[[Any], Any]] = [
    lambda inner: {"anyOf": [inner, False]},
    lambda inner: {"type": "array", "items": inner, "minItems": 1},
    lambda inner: {"type": "object", "properties": {"z": inner}, "required": ["z"]},
    lambda inner: {"$ref": "#/$defs/x", "$defs": {"x": inner}},
]


@pytest.mark.parametrize("name", BOUNDS)
def test_no_pair_of_keywords_is_a_reason_to_refuse(name: str) -> None:
    """Where the schema is not strict: it is served, and some value follows it."""
    draw = random.Random(name)
    for other in BOUNDS:
        kind = draw.choice(["array", "object", "string", ["integer", "array", "object"], None])
        inner = {name: draw.choice(BOUNDS[name]), other: draw.choice(BOUNDS[other])} | ({"type": kind} if kind else {})
        schema = draw.choice(AROUND)(inner) if draw.random() < 0.5 else inner
        schema.setdefault("$defs", {})["no"] = False
        ByteGrammar(GrammarSpec.loose_json_schema(schema)[0])
