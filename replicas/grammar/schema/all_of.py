"""Merge of two schemas into one that says what both say: the tighter of two bounds, the common enumerated values, both
of two items.

For keywords that one keyword cannot stand for (two patterns, two formats) the first stays, and the other is reported.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..regex.string_formats import ANNOTATION_FORMATS as FORMAT_ANNOTATIONS
from .finite_values import canonical_text
from .keywords import PYTHON_TYPES, has_type

_LOWER_BOUNDS = ("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum")
_UPPER_BOUNDS = ("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum")
_VALUES = ("const", "enum")
_OF_LISTS = ("items", "prefixItems")
_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties")
_IGNORED = ("title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated", "readOnly")


def merge_schemas(one: dict[str, Any], other: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a schema that holds what both hold, and the keywords of `other` that it does not hold."""
    both = dict(one)
    lost: list[str] = []
    for keyword, value in other.items():
        if keyword in (*_OF_LISTS, *_OF_OBJECTS):
            continue
        if keyword not in one:
            both[keyword] = copy.deepcopy(value)
        elif one[keyword] != value or isinstance(value, bool) != isinstance(one[keyword], bool):
            try:
                both[keyword] = _merge_keyword(keyword, one[keyword], value)
            except (_NotMergeable, TypeError, ValueError):
                lost += [keyword] * (keyword not in _IGNORED and not keyword.startswith("x-"))
    for merge, concerned in ((_values, _VALUES), (_lists, _OF_LISTS), (_objects, _OF_OBJECTS)):
        try:
            both |= merge(both, one, other)
        except (_NotMergeable, TypeError, ValueError, AttributeError):
            lost += concerned
            both = {keyword: value for keyword, value in both.items() if keyword in one or keyword not in concerned}
    if "const" in both and "enum" not in lost:
        both.pop("enum", None)  # the constant is one of its values
    return both, [keyword for keyword in lost if keyword in other]


def exclude_each_other(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the types, enums and constants of two schemas leave no value that both allow. Other keywords are
    not looked at.
    """
    if one.get("nullable") is True or other.get("nullable") is True:
        return False
    values = next((found for found in map(_named_values, (one, other)) if found is not None), None)
    if values is not None:
        return not _admitted(_admitted(values, one), other)
    return _types_exclude_each_other(one, other)


def _types_exclude_each_other(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    types = [_valid_types(schema) for schema in (one, other)]
    if not all(types):
        return False
    try:
        _types(*types)
    except _NotMergeable:
        return True
    return False


def _named_values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _valid_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the names in the schema's `type`; none if it has no `type`, or one that is not known."""
    given = schema.get("type")
    names: list[Any] = given if isinstance(given, list) else [given]
    return names if all(isinstance(name, str) and name in PYTHON_TYPES for name in names) else []


def _admitted(values: list[Any], schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that the schema allows: by those that it names; if it names none, by its types."""
    named = _named_values(schema)
    if named is not None:
        allowed_texts = set(map(canonical_text, named))
        return [value for value in values if canonical_text(value) in allowed_texts]
    types = _valid_types(schema)
    return [value for value in values if not types or any(has_type(value, name) for name in types)]


class _NotMergeable(Exception):
    """Error for two keywords that no single keyword can stand for."""


def _merge_keyword(keyword: str, one: Any, other: Any) -> Any:
    if keyword in (*_LOWER_BOUNDS, *_UPPER_BOUNDS):
        if isinstance(one, bool) or isinstance(other, bool):
            raise _NotMergeable
        return max(one, other) if keyword in _LOWER_BOUNDS else min(one, other)
    match keyword:
        case "type":
            return _types(one, other)
        case "required" if isinstance(one, list) and isinstance(other, list):
            return [*one, *(name for name in other if name not in one)]
        case "multipleOf" if isinstance(one, int) and isinstance(other, int):
            return math.lcm(one, other)
        case "uniqueItems":
            return one is True or other is True
        case "nullable":
            return one is True and other is True
        case "format" if other in FORMAT_ANNOTATIONS or one in FORMAT_ANNOTATIONS:
            return one if other in FORMAT_ANNOTATIONS else other
        case "propertyNames":
            return {"allOf": [one, copy.deepcopy(other)]}
        case "enum":
            allowed_texts = {canonical_text(value) for value in other}
            return _some([value for value in one if canonical_text(value) in allowed_texts])
        case "$defs" | "definitions" if isinstance(one, dict) and isinstance(other, dict):
            return {**other, **one}
    raise _NotMergeable


def _types(one: Any, other: Any) -> Any:
    """Return the names in `type` that both schemas allow; an integer is a number."""
    ours, theirs = ([given] if isinstance(given, str) else list(given) for given in (one, other))
    allowed = [name for name in ours if name in theirs or (name == "integer" and "number" in theirs)]
    allowed += [name for name in theirs if name == "integer" and "number" in ours and name not in ours]
    found = _some(list(dict.fromkeys(allowed)))
    return found[0] if len(found) == 1 else found


def _values(both: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the enum without values of types that one of the schemas does not allow, if that leaves any.

    Raises _NotMergeable if a constant is not among the values of the enum beside it.
    """
    if "const" in both and "enum" in both and canonical_text(both["const"]) not in map(canonical_text, both["enum"]):
        raise _NotMergeable
    if not isinstance(both.get("enum"), list) or _types_exclude_each_other(one, other):
        return {}
    admitted = _admitted(_admitted(both["enum"], one), other)
    return {"enum": admitted} if admitted else {}


def _lists(_both: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _require_type((one, other), "prefixItems", list)
    count = max(len(schema.get("prefixItems", ())) for schema in (one, other))
    if count:
        found["prefixItems"] = [
            _schema_of_all([_item(schema, index) for schema in (one, other)]) for index in range(count)
        ]
    if rest := [schema["items"] for schema in (one, other) if "items" in schema]:
        found["items"] = _schema_of_all(rest)
    return found


def _require_type(schemas: Iterable[Mapping[str, Any]], keyword: str, kind: type[Any]) -> None:
    """Raise _NotMergeable if a schema has the keyword with a value of another type, which merges to nonsense."""
    if any(keyword in schema and not isinstance(schema[keyword], kind) for schema in schemas):
        raise _NotMergeable


def _item(schema: Mapping[str, Any], index: int) -> Any:
    listed = schema.get("prefixItems", ())
    return listed[index] if index < len(listed) else schema.get("items", True)


def _objects(both: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    mine, theirs = ({key: schema[key] for key in _OF_OBJECTS if key in schema} for schema in (one, other))
    if "patternProperties" in mine or "patternProperties" in theirs:  # it may match names that the other lists
        if mine and theirs and mine != theirs:
            raise _NotMergeable
        return mine or copy.deepcopy(theirs)
    found: dict[str, Any] = {}
    _require_type((one, other), "properties", dict)
    names = dict.fromkeys(name for schema in (one, other) for name in schema.get("properties", ()))
    if names:
        said = {name: _schema_of_all([_property(schema, name) for schema in (one, other)]) for name in names}
        if any(said.get(name) is False for name in both.get("required", ())):
            raise _NotMergeable
        found["properties"] = said
    if others := [schema["additionalProperties"] for schema in (one, other) if "additionalProperties" in schema]:
        found["additionalProperties"] = _schema_of_all(others)
    return found


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """Return what a schema says about a property; for one that it does not list, what it says about all others."""
    listed = schema.get("properties", {})
    return listed[name] if name in listed else schema.get("additionalProperties", True)


def _schema_of_all(schemas: list[Any]) -> Any:
    """Return one schema that holds all of these: the only one that says something, or an `allOf` of several."""
    if False in [schema for schema in schemas if isinstance(schema, bool)]:
        return False
    left: list[Any] = []
    for schema in schemas:
        if schema is not True and schema != {} and schema not in left:
            left.append(schema)
    return copy.deepcopy(left[0] if len(left) == 1 else {"allOf": left}) if left else True


def _some(values: list[Any]) -> list[Any]:
    if not values:
        raise _NotMergeable  # nothing is one of both
    return values
