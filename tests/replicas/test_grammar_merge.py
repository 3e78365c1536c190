"""Schemas of an `allOf` as one: it takes what all of them take, and no more, unless it says what it has lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from schema_values import GROUPS, part, takes

from motley.replicas.grammar.schema import all_of
from motley.replicas.grammar.schema.all_of import merge_schemas
from motley.replicas.grammar.schema.relaxed_schema import relax_schema


def test_what_is_merged_is_no_looser_and_no_stricter() -> None:
    draw = random.Random(0)
    for group in GROUPS * 800:
        check(part(draw, group), part(draw, group))


def check(one: dict[str, Any], other: dict[str, Any]) -> None:
    before = json.dumps([one, other])
    both, lost = merge_schemas(one, other)
    assert json.dumps([one, other]) == before
    held = {keyword: value for keyword, value in other.items() if keyword not in lost}
    assert takes(both) == takes({"allOf": [one, held]}), (one, other, both, lost)


TEXT = {"type": "string"}
PAIRS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = [
    ({**TEXT, "maxLength": 9}, {"maxLength": 3}, {**TEXT, "maxLength": 3}, []),
    ({**TEXT, "minLength": 2}, {"minLength": 4}, {**TEXT, "minLength": 4}, []),
    ({"minimum": 3}, {"minimum": 1, "maximum": 5}, {"minimum": 3, "maximum": 5}, []),
    ({"type": ["string", "null"]}, TEXT, TEXT, []),
    ({"type": "number"}, {"type": ["integer", "string"]}, {"type": "integer"}, []),
    (TEXT, {"type": "integer"}, TEXT, ["type"]),
    ({"enum": [1, 2, "a"]}, {"enum": ["a", 1.0]}, {"enum": [1, "a"]}, []),
    ({"enum": [1]}, {"enum": [2]}, {"enum": [1]}, ["enum"]),
    ({"enum": [1, 2]}, {"const": 2}, {"const": 2}, []),
    ({"const": 1}, {"const": True}, {"const": 1}, ["const"]),
    ({"pattern": "^a"}, {"pattern": "b$"}, {"pattern": "^a"}, ["pattern"]),
    ({"format": "password"}, {"format": "uuid"}, {"format": "uuid"}, []),
    ({"format": "date"}, {"format": "uuid"}, {"format": "date"}, ["format"]),
    ({"multipleOf": 4}, {"multipleOf": 6}, {"multipleOf": 12}, []),
    ({"uniqueItems": False}, {"uniqueItems": True}, {"uniqueItems": True}, []),
    ({"required": ["a"]}, {"required": ["b", "a"]}, {"required": ["a", "b"]}, []),
    ({"properties": {"a": TEXT}}, {"properties": {"a": {"maxLength": 2}}},
     {"properties": {"a": {"allOf": [TEXT, {"maxLength": 2}]}}}, []),
    ({"properties": {"a": TEXT}, "additionalProperties": False}, {"properties": {"a": TEXT, "b": TEXT}},
     {"properties": {"a": TEXT, "b": False}, "additionalProperties": False}, []),
    ({"properties": {"a": TEXT}, "required": ["a"]}, {"properties": {"b": TEXT}, "additionalProperties": False},
     {"properties": {"a": TEXT}, "required": ["a"]}, ["properties", "additionalProperties"]),
    ({"properties": {"a": TEXT}}, {"additionalProperties": {"type": ["string", "integer"]}},
     {"properties": {"a": {"allOf": [TEXT, {"type": ["string", "integer"]}]}},
      "additionalProperties": {"type": ["string", "integer"]}}, []),
    ({"prefixItems": [TEXT]}, {"items": {"maxLength": 2}},
     {"prefixItems": [{"allOf": [TEXT, {"maxLength": 2}]}], "items": {"maxLength": 2}}, []),
    ({"title": "A", "x-a": 1}, {"title": "B", "x-a": 2}, {"title": "A", "x-a": 1}, []),
    ({"properties": 5}, {"properties": {"a": TEXT}}, {"properties": 5}, ["properties"]),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "both", "lost"), PAIRS)
def test_two_that_say_the_same_of_a_value(
    one: dict[str, Any], other: dict[str, Any], both: dict[str, Any], lost: list[str]
) -> None:
    assert merge_schemas(one, other) == (both, lost)


@pytest.mark.parametrize(
    ("schema", "kept", "dropped"),
    [
        ({"allOf": [{**TEXT, "maxLength": 9}, {"maxLength": 3}, {"minLength": 1}]},
         {**TEXT, "minLength": 1, "maxLength": 3}, []),
        ({**TEXT, "maxLength": 2, "allOf": [{"maxLength": 5}]}, {**TEXT, "maxLength": 2}, []),
        ({**TEXT, "pattern": "^a", "allOf": [{"pattern": "b$"}]}, {**TEXT, "pattern": "^a"},
         ["#/properties/x: 'allOf/0/pattern'"]),
        ({**TEXT, "maxLength": 2, "allOf": [{"anyOf": [TEXT]}, {"maxLength": 1}]},
         {"anyOf": [{**TEXT, "maxLength": 1}]}, []),
        ({"allOf": [True, {"anyOf": [TEXT, {"type": "null"}]}]}, {"anyOf": [TEXT, {"type": "null"}]}, []),
        ({**TEXT, "allOf": [False]}, TEXT, ["#/properties/x: 'allOf/0'"]),
        ({**TEXT, "allOf": [{"$ref": "#/$defs/long", "maxLength": 5}]}, TEXT, ["#/properties/x: 'allOf/0'"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}, "required": ["a"]},
         {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
          "additionalProperties": {"type": "integer"}}, []),
        ({"type": "object", "additionalProperties": False, "required": ["a"]},
         {"type": "object", "properties": {"a": True}, "required": ["a"], "additionalProperties": False},
         ["#/properties/x: 'additionalProperties'"]),
    ],
)  # fmt: skip
def test_tools_arguments_are_held_to_all_of_them(
    schema: dict[str, Any], kept: dict[str, Any], dropped: list[str]
) -> None:
    document = {"type": "object", "properties": {"x": schema}, "$defs": {"long": TEXT}}
    expected, _ = relax_schema({"type": "object", "properties": {"x": kept}})
    assert relax_schema(document) == (expected, dropped)


@pytest.mark.parametrize(("count", "whole"), [(3, True), (400, False)])
def test_schemas_that_refer_to_each_other_are_merged_in_bounds(count: int, whole: bool) -> None:
    """Each refers to the next `count` times; beyond what may be copied the rest is left out by name."""
    names = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * count} for i in range(3)}
    document = {"type": "object", "allOf": [{"$ref": "#/$defs/d0"}], "$defs": {**names, "d3": {"required": ["a"]}}}
    kept, dropped = relax_schema(document)
    assert kept["type"] == "object"
    assert (kept.get("required") == ["a"], dropped == []) == (whole, whole)


def test_values_are_compared_as_often_as_there_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each a few times, not with each other."""
    read: list[Any] = []

    def noted(value: Any) -> str:
        read.append(value)
        return str(value)

    monkeypatch.setattr(all_of, "canonical_text", noted)
    enum = {"enum": [f"v{index}" for index in range(300)]}
    both, lost = merge_schemas(enum, {"type": "string", "enum": [*enum["enum"], 7]})
    assert (both, lost) == ({"type": "string", **enum}, [])
    assert not all_of.exclude_each_other(enum, enum)
    assert len(read) < 12 * 300
