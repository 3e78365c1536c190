"""A schema that cannot be enforced as it is: everything is enforced that can be, and what is left out is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.replicas.grammar.regex.text_rules import TextRule, find_text_rule_fault, follows_pattern
from motley.replicas.grammar.schema import schema_check
from motley.replicas.grammar.schema.keywords import KEYWORDS
from motley.replicas.grammar.schema.relaxed_schema import MAX_REPAIRS, relax_schema
from motley.replicas.grammar.schema.schema_check import MAX_NODES, check_schema

INT32 = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


INTEGER = {"type": "integer"}
TEXT = {"type": "string"}
UNORDERED = {"type": "object", "properties": {"a": TEXT, "b": INTEGER}}
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
        {**UNORDERED, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"anyOf": [{**UNORDERED, "required": ["a"]}, {**UNORDERED, "required": ["b"]}]}, [],
    ),
    "exactly one of two required": (
        {**UNORDERED, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"anyOf": [{**UNORDERED, "required": ["a"]}, {**UNORDERED, "required": ["b"]}]}, ["#: 'oneOf'"],
    ),
    "one of two required, in an allOf": (
        {**UNORDERED, "allOf": [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}]},
        {"anyOf": [{**UNORDERED, "required": ["a"]}, {**UNORDERED, "required": ["b"]}]}, [],
    ),
    "a choice in a choice": (
        {**INTEGER, "anyOf": [{"anyOf": [{"maximum": 1}, {"minimum": 3}]}, {"enum": [2]}]},
        {"anyOf": [{"anyOf": [{**INTEGER, "maximum": 1}, {**INTEGER, "minimum": 3}]}, {**INTEGER, "enum": [2]}]}, [],
    ),
    "a choice by reference": (
        {"$ref": "#/$defs/u", "minimum": 3, "$defs": {"u": {"anyOf": [INTEGER, {**INTEGER, "minimum": 5}]}}},
        {"anyOf": [{**INTEGER, "minimum": 3}, {**INTEGER, "minimum": 5}]}, [],
    ),
    "more items than a list may have": (
        of(a={"type": "array", "prefixItems": [INTEGER, TEXT], "maxItems": 1}),
        of(a={"type": "array", "prefixItems": [INTEGER], "maxItems": 1}), [],
    ),
    "more names than are sure to differ": (
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 3},
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 1}, ["#: 'minProperties'"],
    ),
    "types in capitals": (
        {"type": "OBJECT", "properties": {"a": {"type": ["STRING", "NULL"]}}, "required": ["a"]},
        of(a={"type": ["string", "null"]}), [],
    ),
    "Python's types": (
        {"type": "dict", "properties": {"a": {"type": "float"}, "b": {"type": "any"}}, "required": ["a", "b"]},
        of(a={"type": "number"}, b={}), ["#/properties/b: 'type'"],
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
        {"type": "object", "required": ["a"], "properties": 5},
        check_schema({**of(a=True), "additionalProperties": True}, "x"), ["#: 'properties'"],
    ),
    "keywords beside a reference": (
        {**of(a={"$ref": "#/$defs/n", "minimum": 5}, b={"$ref": "#/$defs/n", "enum": [77]}), "$defs": {"n": INTEGER}},
        of(a={**INTEGER, "minimum": 5}, b={**INTEGER, "enum": [77]}), [],
    ),
    "keywords beside a reference of the whole": (
        {"$ref": "#/$defs/a", "required": ["a"], "$defs": {"a": {"type": "object", "properties": {"a": INTEGER}}}},
        of(a=INTEGER), [],
    ),
    "keywords beside a reference to nothing": (
        of(a={"$ref": "#/$defs/none", "minimum": 5}, b=TEXT), of(a={}, b=TEXT),
        ["#/properties/a: 'minimum'", "#/properties/a: '$ref'"],
    ),
    "a length of a list of anything": (
        of(a={"type": "array", "minItems": 2}), of(a={"type": "array", "minItems": 2, "items": True}), [],
    ),
    "a reference elsewhere": (of(a={"$ref": "https://x/y"}, b=TEXT), of(a={}, b=TEXT), ["#/properties/a: '$ref'"]),
    "a pattern": (
        of(a={**TEXT, "pattern": "a(?=b)"}), of(a=TEXT), ["#/properties/a: 'pattern'"],
    ),
    "a type of another language": (of(a={"type": "Text"}, b=TEXT), of(a={}, b=TEXT), ["#/properties/a: 'type'"]),
    "an enum with null": (of(a={**TEXT, "enum": ["x", None]}), of(a={"enum": ["x", None]}), ["#/properties/a: 'type'"]),
    "bounds that leave nothing": (
        of(a={"type": "integer", "minimum": 3, "maximum": 2, "multipleOf": 5}),
        of(a={"type": "integer", "multipleOf": 5}),
        ["#/properties/a: 'minimum'", "#/properties/a: 'maximum'"],
    ),
    "more required than may be": (
        {**of(p=TEXT, q=TEXT), "maxProperties": 1}, of(p=TEXT, q=TEXT), ["#: 'maxProperties'"],
    ),
    "more required than may be, by an allOf": (
        {"allOf": [of(p=TEXT), {**of(q=TEXT), "maxProperties": 1}]}, of(p=TEXT, q=TEXT), ["#: 'maxProperties'"],
    ),
    "more names than the schema has": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 3},
        {"type": "object", "properties": {"a": True, "b": True}, "additionalProperties": False, "minProperties": 2},
        ["#: 'minProperties'"],
    ),
    "more names than follow a pattern and are sure to differ": (
        {"type": "object", "propertyNames": {"pattern": "^a"}, "minProperties": 3},
        check_schema({"type": "object", "propertyNames": {"pattern": "^a"}, "minProperties": 1}, "x"),
        ["#: 'minProperties'"],
    ),
    "more properties than are described": (
        {**UNORDERED, "minProperties": 3}, {**UNORDERED, "minProperties": 2}, ["#: 'minProperties'"],
    ),
    "more properties than can have a value": (
        {"type": "object", "properties": {"a": TEXT, "b": {"$ref": "#"}}, "minProperties": 2},
        {"type": "object", "properties": {"a": TEXT, "b": {"$ref": "#"}}, "minProperties": 1}, ["#: 'minProperties'"],
    ),
    "more items than are described": (
        {"type": "array", "prefixItems": [TEXT], "items": False, "minItems": 2},
        {"type": "array", "prefixItems": [TEXT], "items": False, "minItems": 1}, ["#: 'minItems'"],
    ),
    "true and false as items": (
        of(a={"type": "array", "prefixItems": [True, {"anyOf": [TEXT, False]}, False]}),
        of(a={"type": "array", "prefixItems": [{}, {"anyOf": [TEXT]}], "items": False}), [],
    ),
    "an item that can have no value": (
        of(a={"type": "array", "prefixItems": [TEXT, False], "minItems": 2}),
        of(a={"type": "array", "prefixItems": [TEXT], "items": False, "minItems": 1}),
        ["#/properties/a: 'minItems'"],
    ),
    "a required property that can have no value": (
        {**of(a=TEXT, b={"$ref": "#/$defs/no"}), "$defs": {"no": False}},
        {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}, ["#: 'required'"],
    ),
    "a list without an end": (
        of(value=TEXT, next={"$ref": "#"}),
        {"type": "object", "properties": {"value": TEXT, "next": {"$ref": "#"}}, "required": ["value"], "x-which": 1},
        ["#: 'required'"],
    ),
    "false in a choice beside other keywords": (
        {**UNORDERED, "anyOf": [{"required": ["a"]}, False]}, {"anyOf": [{**UNORDERED, "required": ["a"]}]}, [],
    ),
    "names of a pattern that are forbidden": (
        {"type": "object", "patternProperties": {"^a": False}}, {"type": "object", "additionalProperties": False}, [],
    ),
    "a format that names cannot have": (
        {"type": "object", "propertyNames": {"format": "uri-reference"}},
        {"type": "object", "additionalProperties": True}, ["#/propertyNames: 'format'"],
    ),
    "a format that names cannot have, by reference": (
        {**of(a=TEXT, b={"type": "object", "propertyNames": {"$ref": "#/$defs/u"}}, c={"$ref": "#/$defs/u"}),
         "$defs": {"u": {**TEXT, "format": "uri-reference"}}},
        {**of(a=TEXT, b={"type": "object", "additionalProperties": True}, c={"$ref": "#/$defs/0"}),
         "$defs": {"0": {**TEXT, "format": "uri-reference"}}},
        ["#/properties/b: 'propertyNames'"],
    ),
    "properties and items that are none, in an allOf": (
        of(a={"allOf": [{"type": "object", "properties": [True]}, {"type": "object", "maxProperties": 1}]},
           b={"allOf": [{"type": "array", "prefixItems": {"a": False}}, {"type": "array", "maxItems": 1}]}),
        of(a={"type": "object", "maxProperties": 1, "additionalProperties": True},
           b={"type": "array", "maxItems": 1, "items": True}),
        ["#/properties/a: 'allOf/0/properties'", "#/properties/b: 'allOf/0/prefixItems'"],
    ),
    "an object of which nothing but a name is said": (
        {"type": "object", "required": ["a"]}, check_schema({**of(a=True), "additionalProperties": True}, "x"), [],
    ),
    "an object of which nothing is said": (
        of(a={"type": "object"}), of(a={"type": "object", "additionalProperties": True}), [],
    ),
    "a length beside a pattern": (
        of(a={**TEXT, "pattern": "^/?([^/]+/)*[^/]+$", "maxLength": 4096}, b={**TEXT, "maxLength": 9}),
        check_schema(of(a={**TEXT, "pattern": "^/?([^/]+/)*[^/]+$"}, b={**TEXT, "maxLength": 9}), "x"),
        ["#/properties/a: 'maxLength'"],
    ),
    "one of two lengths beside a pattern": (
        of(a={"type": ["string", "null"], "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$", "minLength": 2, "maxLength": 1000}),
        check_schema(of(a={"type": ["string", "null"], "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$", "minLength": 2}), "x"),
        ["#/properties/a: 'maxLength'"],
    ),
    "a length that its pattern never has": (
        of(a={**TEXT, "pattern": "^[a-z]$", "minLength": 3}), check_schema(of(a={**TEXT, "pattern": "^[a-z]$"}), "x"),
        ["#/properties/a: 'minLength'"],
    ),
    "a pattern that nothing follows": (
        of(a={**TEXT, "pattern": "^(?=a)b$", "maxLength": 2}), check_schema(of(a={**TEXT, "maxLength": 2}), "x"),
        ["#/properties/a: 'pattern'"],
    ),
    "a pattern of too many states": (
        of(a={**TEXT, "pattern": "^(?=.*a.{20}$)[ab]*$"}), of(a=TEXT), ["#/properties/a: 'pattern'"],
    ),
    "a format that has no lengths": (
        of(a={**TEXT, "format": "uri-reference", "maxLength": 45}), of(a={**TEXT, "format": "uri-reference"}),
        ["#/properties/a: 'maxLength'"],
    ),
    "a length of names": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+(-[a-z]+)*$", "maxLength": 9000}},
        check_schema({"type": "object", "propertyNames": {"pattern": "^[a-z]+(-[a-z]+)*$"}}, "x"),
        ["#/propertyNames: 'maxLength'"],
    ),
    "other names than very many": (
        {**of(**{f"{i:03}" * 9: True for i in range(200)}), "additionalProperties": TEXT},
        check_schema({**of(**{f"{i:03}" * 9: True for i in range(200)}), "additionalProperties": False}, "x"),
        ["#: 'additionalProperties'"],
    ),
    "a reference into a list that may be null": (
        of(a={"type": "array", "nullable": True, "items": {**TEXT, "enum": ["x"]}}, c={"$ref": "#/properties/a/items"}),
        {**of(a={"anyOf": [{"type": "array", "items": {**TEXT, "enum": ["x"]}}, {"type": "null"}]},
              c={"$ref": "#/$defs/0"}),
         "$defs": {"0": {**TEXT, "enum": ["x"]}}}, [],
    ),
    "a reference into an allOf": (
        {"allOf": [of(x=INTEGER), of(y={"$ref": "#/allOf/0/properties/x"})]},
        {**of(x=INTEGER, y={"$ref": "#/$defs/0"}), "$defs": {"0": INTEGER}}, [],
    ),
    "a reference beside a choice": (
        {"type": "object", "properties": {"a": TEXT, "b": {"$ref": "#/properties/a"}},
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"anyOf": [{"type": "object", "properties": {"a": TEXT, "b": {"$ref": "#/$defs/0"}}, "required": [name]}
                   for name in "ab"], "$defs": {"0": TEXT}}, [],
    ),
    "a reference to a schema of a choice, without the keywords beside that": (
        {**of(a={"minimum": 3, "oneOf": [INTEGER, {"type": "null"}]}, b={"$ref": "#/properties/a/oneOf/0"})},
        {**of(a={"anyOf": [{**INTEGER, "minimum": 3}, {"type": "null"}]}, b={"$ref": "#/$defs/0"}),
         "$defs": {"0": INTEGER}}, ["#/properties/a/oneOf/1: 'minimum'"],
    ),
    "a reference to a schema that moves up in an allOf": (
        of(a={"allOf": [{"title": "none"}, {"anyOf": [TEXT, INTEGER]}]}, b={"$ref": "#/properties/a/allOf/0"},
           c={"$ref": "#/properties/a/allOf/1/anyOf/1"}),
        {**of(a={"anyOf": [TEXT, INTEGER]}, b={"$ref": "#/$defs/0"}, c={"$ref": "#/$defs/1"}),
         "$defs": {"0": {}, "1": INTEGER}}, [],
    ),
    "a reference to another document's place for schemas": (
        {**of(a={"$ref": "#/components/schemas/A~1b"}), "components": {"schemas": {"A/b": {**TEXT, "format": "isbn"}}}},
        {**of(a={"$ref": "#/$defs/0"}), "$defs": {"0": TEXT}},
        ["#: 'components'", "#/components/schemas/A/b: 'format'"],
    ),
    "a circle by a place that moves": (
        {"type": "object", "nullable": True, "properties": {"next": {"$ref": "#/properties/list/items"},
         "list": {"type": "array", "items": of(next={"$ref": "#/properties/list"})}}},
        {"anyOf": [
            {"type": "object", "properties": {"next": {"$ref": "#/$defs/0"},
             "list": {"type": "array", "items": of(next={"$ref": "#/$defs/1"})}}, "x-which": 1}, {"type": "null"}],
         "$defs": {"0": of(next={"$ref": "#/$defs/1"}),
                   "1": {"type": "array", "items": of(next={"$ref": "#/$defs/1"})}}},
        [],
    ),
    "names that are required, by the patterns that they follow": (
        {"type": "object", "required": ["abc", "ab", "x"], "additionalProperties": TEXT,
         "patternProperties": {"^a": INTEGER, "c$": {"minimum": 2}, "(": TEXT}},
        {**of(abc={**INTEGER, "minimum": 2}, ab=INTEGER, x=TEXT), "additionalProperties": TEXT,
         "propertyNames": {"pattern": TextRule(other_than=("abc", "ab", "x")).encoded()}, "x-which": 1},
        ["#: 'patternProperties'"],
    ),
    "an option that the type beside it forbids": (
        {**UNORDERED, "anyOf": [{"type": "null"}, {"required": ["a"]}, {"enum": [None, 1]}, {"const": "a"}]},
        {"anyOf": [{**UNORDERED, "required": ["a"]}]}, [],
    ),
    "values of which a type beside them allows some": (
        of(a={**TEXT, "oneOf": [{"enum": ["x", None, 3]}, {"const": "y"}]},
           b={"allOf": [{"type": ["string", "null"]}, {"enum": ["x", None, 3]}]}),
        of(a={"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "string", "const": "y"}]},
           b={"type": ["string", "null"], "enum": ["x", None]}), [],
    ),
    "options that the type beside them forbids, all of them": (
        of(a={**TEXT, "anyOf": [{"type": "null"}, INTEGER]}), of(a={"anyOf": [TEXT, TEXT]}),
        ["#/properties/a: 'anyOf/0/type'", "#/properties/a: 'anyOf/1/type'"],
    ),
    "an option that may be null": (
        of(a={**TEXT, "anyOf": [{**INTEGER, "nullable": True}, {"maxLength": 2}]}),
        check_schema(of(a={"anyOf": [{"anyOf": [TEXT, {"type": "null"}]}, {**TEXT, "maxLength": 2}]}), "x"),
        ["#/properties/a: 'anyOf/0/type'"],
    ),
    "values beside bounds": (
        of(a={**INTEGER, "enum": [1, 2, 9, -1.5], "exclusiveMaximum": 9, "minimum": -1},
           b={"enum": ["", "ab", None, [1, 2], {}], "maxLength": 1, "minItems": 3, "minProperties": 1},
           c={"const": 4, "minimum": 4}),
        of(a={**INTEGER, "enum": [1, 2]}, b={"enum": ["", None]}, c={"const": 4}), [],
    ),
    "values of which none is within the bounds beside them": (
        of(a={**INTEGER, "enum": [1, 2], "minimum": 5}, b={"const": "abc", "maxLength": 2}),
        of(a={**INTEGER, "enum": [1, 2]}, b={"const": "abc"}),
        ["#/properties/a: 'minimum'", "#/properties/b: 'maxLength'"],
    ),
    "bounds that are none, beside values": (
        of(a={**INTEGER, "enum": [1, 2], "minimum": "5"}), of(a={**INTEGER, "enum": [1, 2]}),
        ["#/properties/a: 'minimum'"],
    ),
    "items one by one, as draft 7 has them": (
        of(a={"type": "array", "items": [INTEGER, TEXT], "additionalItems": False},
           b={"type": "array", "items": [INTEGER, {"$ref": "#/properties/a/items/1"}], "minItems": 1},
           c={"type": "array", "items": [], "additionalItems": TEXT}),
        {**of(a={"type": "array", "prefixItems": [INTEGER, TEXT], "items": False},
              b={"type": "array", "prefixItems": [INTEGER, {"$ref": "#/$defs/0"}], "minItems": 1, "items": True},
              c={"type": "array", "items": TEXT}),
         "$defs": {"0": TEXT}}, [],
    ),
    "bounds that are not reached, as OpenAPI 3.0 has them": (
        of(a={**INTEGER, "minimum": 0, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False},
           b={"allOf": [{**INTEGER, "maximum": 9, "exclusiveMaximum": True}, {"minimum": 3}]}),
        of(a={**INTEGER, "minimum": 1, "maximum": 9}, b={**INTEGER, "minimum": 3, "maximum": 8}), [],
    ),
    "a schema that is none": (of(a="text", b=TEXT), of(a=True, b=TEXT), ["#/properties/a: 'the schema'"]),
}  # fmt: skip


def test_a_choice_of_itself_ends() -> None:
    itself = {**INTEGER, "anyOf": [{"$ref": "#/$defs/u"}, {"minimum": 5}]}
    found, dropped = relax_schema(of(a={"$ref": "#/$defs/u"}) | {"$defs": {"u": itself}})
    node = found["$defs"]["0"]
    while "anyOf" in node:
        node, other = node["anyOf"]
        assert other == {**INTEGER, "minimum": 5}
    assert node == INTEGER
    assert [text.rpartition(" ")[2] for text in dropped] == ["'anyOf'"]


@pytest.mark.parametrize("name", KEPT)
def test_what_can_be_kept_is(name: str) -> None:
    given_schema, kept, dropped = KEPT[name]
    before = json.dumps(given_schema)
    assert relax_schema(given_schema) == (kept, dropped)
    assert json.dumps(given_schema) == before, "the client's own schema is what the model is shown"


def test_what_can_be_kept_to_is_kept_as_it_is() -> None:
    schema = {
        "$defs": {"a": of(b={"type": "string", "format": "date", "maxLength": 10})},
        **of(a={"$ref": "#/$defs/a"}),
    }
    assert relax_schema(schema) == (check_schema(schema, "x"), [])


def test_a_constant_that_looks_like_a_reference_stays() -> None:
    like = {"const": {"$ref": "#/allOf/0/properties/b"}}
    found, dropped = relax_schema({"allOf": [of(a=like, b=TEXT), of(c={"$ref": "#/allOf/0/properties/b"})]})
    assert (found["properties"]["a"], found["properties"]["c"]) == (like, {"$ref": "#/$defs/0"})
    assert dropped == []


@pytest.mark.parametrize("schema", [True, {}, {"$ref": "#"}, {"$ref": "#other"}, {"$defs": 5, "$ref": "#/items"}])
def test_a_schema_of_nothing_to_hold_is_any_value(schema: Any) -> None:
    assert relax_schema(schema)[0] in (True, {})


def test_as_many_places_are_copied_as_a_document_may_have_schemas() -> None:
    """The others are left where they are, and no reference is lost that leads to a place which is not moved."""
    places = [of(**{f"p{index}": TEXT for index in range(100)}) for _ in range(30)]
    schema = {"allOf": [of(**{f"a{index}": {"$ref": f"#/allOf/{index + 1}"} for index in range(30)}), *places]}
    found, dropped = relax_schema(schema)
    held = [name for name, inner in found["properties"].items() if "$ref" in inner]
    lost = [name for name in found["properties"] if f"#/properties/{name}: '$ref'" in dropped]
    assert (len(held), len(held) + len(lost)) == (9, 30)


def test_copies_that_are_too_much_cost_only_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of each pattern would be more than patterns may have together."""
    monkeypatch.setattr(schema_check, "MAX_PATTERNS", 1000)
    long = {**TEXT, "pattern": "a" * 400}
    schema = {"allOf": [of(a=long, b=TEXT), of(c={"$ref": "#/allOf/0/properties/a"}), {"properties": {"d": long}}]}
    found, dropped = relax_schema(schema)
    assert list(found["properties"]) == ["a", "b", "c", "d"]
    assert dropped == ["#/properties/c: '$ref'"]


@pytest.mark.parametrize("lengths", [{"maxLength": 100}, {"maxLength": 255}, {"minLength": 20, "maxLength": 30}])
@pytest.mark.parametrize("name", ["email", "hostname", "uri", "uuid", "date-time"])
def test_formats_keep_the_lengths_beside_them(name: str, lengths: dict[str, int]) -> None:
    if name == "uuid" and lengths["maxLength"] == 30:
        lengths = {"maxLength": 36}
    schema = of(a={**TEXT, "format": name, **lengths})
    assert relax_schema(schema) == (check_schema(schema, "x"), [])


@pytest.mark.slow("Automata of many patterns, each nearly as large as one may be")
def test_many_patterns_take_no_more_effort_than_one_document_may() -> None:
    """The automata of each are near what one may be; those that are not looked at lose their lengths."""
    texts = {f"p{i}": {**TEXT, "pattern": f"^[a-y]+([{'|'.join('bcdfghjklm')}]+z{i})*$", "maxLength": 400}
             for i in range(300)}  # fmt: skip
    before = find_text_rule_fault.cache_info().misses
    kept, dropped = relax_schema(of(**texts))
    assert find_text_rule_fault.cache_info().misses - before < 400
    assert list(kept["properties"]) == list(texts)
    assert all("pattern" in inner for inner in kept["properties"].values())
    assert {line.rpartition(" ")[2] for line in dropped} <= {"'maxLength'"}
    assert len(dropped) > 100
    assert relax_schema(of(**texts)) == (kept, dropped), "the same each time"


@pytest.mark.parametrize(
    "schema",
    [
        {**of(a=TEXT, b=TEXT), "$defs": {f"d{i}": {"$ref": "#/none"} for i in range(MAX_REPAIRS + 5)}},
        of(**{"a": TEXT, "b": {"anyOf": [{}] * (MAX_NODES + 5)}}),
    ],
    ids=["too many repairs", "too many schemas"],
)
def test_names_are_kept_of_what_is_too_much(schema: dict[str, Any]) -> None:
    kept, dropped = relax_schema(schema)
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
    kept, _ = relax_schema(schema)
    assert isinstance(kept, dict | bool)
    required = schema.get("required")
    if isinstance(kept, dict) and "properties" in kept and isinstance(required, list) and "allOf" not in schema:
        assert {name for name in required if isinstance(name, str)} <= set(kept["properties"])


@pytest.mark.parametrize(
    ("pattern", "name", "follows"),
    [
        ("^a", "abc", True), ("b", "abc", True), ("^b", "abc", False), ("c$", "abc", True), ("", "", True),
        ("^(?=.*c)a", "abc", True), ("^(?!a)", "abc", False), (r"^\d+$", "12", True), ("^ab?c?$", "abcd", False),
        ("(", "(", False), (r"^(?=.*a.{20}$)[ab]*$", "ba" + "b" * 20, True),
        ("((a{1,100}){1,100}){1,100}", "aa", False),
    ],
)  # fmt: skip
def test_a_name_follows_a_pattern_or_takes_too_long(pattern: str, name: str, follows: bool) -> None:
    assert follows_pattern(pattern, name)[0] is follows


def test_many_formats_are_kept_whatever_effort_others_take() -> None:
    hosts = {f"h{i}": {**TEXT, "format": "hostname"} for i in range(300)}
    large = {f"p{i}": {**TEXT, "pattern": f"^(?=.*a.{{2{i}}}$)[ab]*$"} for i in range(9)}
    addresses = {"b": {**TEXT, "format": "ipv6"}}
    kept, dropped = relax_schema(of(**large, **hosts, **addresses))
    assert dropped == [f"#/properties/{name}: 'pattern'" for name in large]
    assert kept == check_schema(of(**dict.fromkeys(large, TEXT), **hosts, **addresses), "x")
