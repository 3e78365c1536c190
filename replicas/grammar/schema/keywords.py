"""Keywords of JSON Schema that are supported, and whether the keywords of one schema make sense together.

Looks at one schema at a time; schema_check.py looks at the schemas within it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from fractions import Fraction
from typing import Any

from ..regex.string_formats import ANNOTATION_FORMATS as FORMAT_ANNOTATIONS
from ..regex.string_formats import FORMATS, INTEGER_FORMATS
from ..regex.text_rules import TextRule
from .references import SchemaPath

MAX_COUNT = 10_000  # most items, properties or characters that a bound may ask for
MAX_SHOWN = 60  # most characters of each name in a place that an error shows
MAX_STEP = 1024  # largest multipleOf, as the library counts

PYTHON_TYPES: Mapping[str, Any] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
ANNOTATION_KEYWORDS = frozenset((
    "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema", "default",
    "definitions", "deprecated", "description", "discriminator", "example", "examples", "readOnly", "title",
    "writeOnly",
))  # fmt: skip
# Keywords that hold schemas.
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
LISTED_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE_SCHEMAS = ("items", "additionalProperties", "propertyNames")
# Keywords that say by themselves which values are meant: no other keyword may narrow the same values.
WHOLE_KEYWORDS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format")
TYPE_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": _NUMBER,
    "integer": (*_NUMBER, "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        "properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties",
        "propertyNames",
    ),
    "boolean": (),
    "null": (),
}  # fmt: skip
KEYWORDS = frozenset(("type", *WHOLE_KEYWORDS, *(keyword for group in TYPE_KEYWORDS.values() for keyword in group)))
NEUTRAL_VALUES: Mapping[str, Any] = {
    "nullable": False,
    "uniqueItems": False,
}  # a value with which a keyword says nothing
IMPLIED_TYPES = ("object", "array")  # types that their keywords alone imply
NAMING_KEYWORDS = ("properties", "patternProperties", "additionalProperties", "propertyNames")
NUMBER_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_DECIMALS = 6  # most decimals of a number within bounds, as the library writes it
_COUNTED = ("Length", "Items", "Properties")
_CALLED: dict[type[Any], str] = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


class SchemaRefused(Exception):
    """Error that says why a schema is refused, without the field's name.

    drops    keywords of that schema without which it might be accepted
    instead  keywords with values that ask for less, to put in the place of those
    place    the schema's place in the document; None until it is known
    """

    def __init__(
        self,
        why: str,
        code: str = "invalid_grammar",
        *,
        drops: Iterable[str] = (),
        instead: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(why)
        self.why, self.code, self.drops = why, code, tuple(drops)
        self.instead = dict(instead or {})
        self.place: SchemaPath | None = None


def format_path(place: SchemaPath) -> str:
    return "/".join(("#", *(part[:MAX_SHOWN] for part in place)))


def inner_schemas(node: dict[str, Any], place: SchemaPath) -> Iterator[tuple[SchemaPath, Any]]:
    """Yield the schemas that a schema holds, with their places in it."""
    path = format_path(place)
    for keyword in SCHEMAS_BY_NAME:
        for name, inner in take_typed(node, keyword, dict, {}, path).items():
            yield (keyword, name), inner
    for keyword in LISTED_SCHEMAS:
        for index, inner in enumerate(take_typed(node, keyword, list, [], path)):
            yield (keyword, str(index)), inner
    for keyword in SINGLE_SCHEMAS:
        if keyword in node:
            yield (keyword,), _as_name_schema(node[keyword]) if keyword == "propertyNames" else node[keyword]


def _as_name_schema(node: Any) -> Any:
    """Return the schema of property names as one of strings, whether it says so or not."""
    return {"type": "string", **node} if isinstance(node, dict) and node.keys().isdisjoint(WHOLE_KEYWORDS) else node


def is_neutral(node: dict[str, Any], keyword: str) -> bool:
    return keyword in NEUTRAL_VALUES and node[keyword] is NEUTRAL_VALUES[keyword]


def check_node(node: dict[str, Any], path: str) -> None:
    """Raise SchemaRefused, naming the place and the keyword, if the schema's own keywords cannot be kept to."""
    for keyword in node:
        is_supported = keyword in KEYWORDS or keyword in ANNOTATION_KEYWORDS or keyword.startswith("x-")
        if not is_supported and not is_neutral(node, keyword):
            raise SchemaRefused(f"{path}: the keyword {keyword[:60]!r} is not supported", drops=[keyword])
    if "$id" in node and path != "#":
        raise SchemaRefused(f"{path}: $id is supported at the top only", drops=["$id"])
    narrowing = [keyword for keyword in node if keyword in KEYWORDS and not is_neutral(node, keyword)]
    whole = next((keyword for keyword in WHOLE_KEYWORDS if keyword in node), None)
    if whole in ("enum", "const"):
        _check_values(node, whole, narrowing, path)
    elif whole is not None:
        _check_whole(node, whole, narrowing, path)
    else:
        _check_types(node, narrowing, path)


def _check_whole(node: dict[str, Any], whole: str, narrowing: list[str], path: str) -> None:
    others = [keyword for keyword in narrowing if keyword != whole]
    if others:
        drops = [whole] if whole != "$ref" and "properties" in others else others
        raise SchemaRefused(f"{path}: {others[0]!r} beside {whole!r} is not supported", drops=drops)
    if whole != "$ref" and not take_typed(node, whole, list, [], path):
        raise SchemaRefused(f"{path}: {whole!r} is empty; expected at least one schema", drops=[whole])
    if whole == "allOf" and len(node["allOf"]) > 1:
        raise SchemaRefused(f"{path}: 'allOf' of more than one schema is not supported", drops=["allOf"])


def _check_values(node: dict[str, Any], whole: str, narrowing: list[str], path: str) -> None:
    for keyword in narrowing:
        if keyword not in (whole, "type"):
            raise SchemaRefused(f"{path}: {keyword!r} beside {whole!r} is not supported", drops=[keyword])
    values = take_typed(node, "enum", list, [], path) if whole == "enum" else [node["const"]]
    if not values:
        raise SchemaRefused(f"{path}: 'enum' is empty", drops=["enum"])
    names = type_names(node, path)
    for value in values:
        _check_integers(value, path, whole)
        if "type" in node and not any(has_type(value, name) for name in names):
            why = f"{path}: the {whole} {str(value)[:40]!r} is not of type {str(node['type'])[:40]}"
            raise SchemaRefused(why, drops=["type"])


def _check_types(node: dict[str, Any], narrowing: list[str], path: str) -> None:
    names = type_names(node, path)
    for keyword in narrowing:
        if keyword == "type" or any(keyword in TYPE_KEYWORDS[name] for name in names):
            continue
        if names:
            raise SchemaRefused(f"{path}: {keyword!r} is not supported for type {', '.join(names)}", drops=[keyword])
        if not any(keyword in TYPE_KEYWORDS[name] for name in IMPLIED_TYPES):
            raise SchemaRefused(f"{path}: {keyword!r} needs a 'type' beside it", drops=[keyword])
    if not names and {keyword in TYPE_KEYWORDS["object"] for keyword in narrowing} == {True, False}:
        drops = [keyword for keyword in narrowing if keyword not in TYPE_KEYWORDS["object"]]
        raise SchemaRefused(f"{path}: keywords of objects and of arrays need a 'type' beside them", drops=drops)
    _check_strings(node, names, path)
    _check_counts(node, path)
    _check_numbers(node, names, path)
    _check_properties(node, path)
    take_typed(node, "uniqueItems", bool, False, path)
    _check_min_count(
        node, path, "minProperties", take_typed(node, "properties", dict, {}, path), "additionalProperties"
    )
    _check_min_count(node, path, "minItems", take_typed(node, "prefixItems", list, [], path), "items")


def _check_strings(node: dict[str, Any], names: list[str], path: str) -> None:
    given = take_typed(node, "format", str, None, path)
    accepted_formats = FORMATS | FORMAT_ANNOTATIONS | (frozenset() if "string" in names else INTEGER_FORMATS.keys())
    if given is not None and given not in accepted_formats:
        raise SchemaRefused(f"{path}: format {given[:40]!r} is none of {', '.join(sorted(FORMATS))}", drops=["format"])
    pattern = take_typed(node, "pattern", str, None, path)
    if pattern is None:
        return
    if given in FORMATS:
        raise SchemaRefused(f"{path}: of pattern and format only one can be kept to", drops=["format"])
    try:
        TextRule(pattern).read()
    except ValueError as error:
        raise SchemaRefused(f"{path}/pattern: {error}", drops=["pattern"]) from None


def _check_integers(value: Any, path: str, whole: str) -> None:
    """Raise SchemaRefused for an integer beyond 64 bits that is no double: the library reads it as a double, and would
    write another number.
    """
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, int) and not -(2**63) <= value < 2**63 and not _is_double(value):
            raise SchemaRefused(f"{path}: the {whole} {str(value)[:40]} is more than a double can tell", drops=[whole])


def _check_numbers(node: dict[str, Any], names: list[str], path: str) -> None:
    step = node.get("multipleOf", 1)
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= MAX_STEP:
        raise SchemaRefused(f"{path}/multipleOf: expected an integer from 1 to {MAX_STEP}", drops=["multipleOf"])
    if "number" in names and "multipleOf" in node:
        raise SchemaRefused(f"{path}: 'multipleOf' is supported for integers, not for numbers", drops=["multipleOf"])
    given = [keyword for keyword in NUMBER_BOUNDS if keyword in node]
    for keyword in given:
        value = node[keyword]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SchemaRefused(f"{path}/{keyword}: expected a number", drops=[keyword])
        exact = "number" not in names and isinstance(value, int)
        if not exact and not (math.isfinite(value) if isinstance(value, float) else _is_double(value)):
            why = f"{path}/{keyword}: {str(value)[:40]} is more than a double can tell"
            raise SchemaRefused(why, drops=[keyword])
    decimals = _DECIMALS if "number" in names else 0
    lower, upper = integer_bounds(node, decimals)
    if lower is not None and upper is not None and lower > upper:
        what = f"no number of {_DECIMALS} decimals" if decimals else "no integer"
        raise SchemaRefused(f"{path}: {what} lies between its bounds: {', '.join(given)}", drops=given)
    for limit in (lower, upper):
        if decimals == 0 and limit is not None and not -(2**63) <= limit < 2**63:
            raise SchemaRefused(f"{path}: Integer exceeds what 64 bits can hold in its bounds", drops=given)


def integer_bounds(node: dict[str, Any], decimals: int) -> tuple[int | None, int | None]:
    """Return the least and the largest number with that many decimals within the bounds, in units of the last
    decimal.
    """
    steps = {key: Fraction(str(node[key])) * 10**decimals for key in NUMBER_BOUNDS if key in node}
    lower = [math.ceil(steps[key]) for key in ("minimum",) if key in steps]
    lower += [math.floor(steps[key]) + 1 for key in ("exclusiveMinimum",) if key in steps]
    upper = [math.floor(steps[key]) for key in ("maximum",) if key in steps]
    upper += [math.ceil(steps[key]) - 1 for key in ("exclusiveMaximum",) if key in steps]
    return max(lower, default=None), min(upper, default=None)


def _is_double(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _check_counts(node: dict[str, Any], path: str) -> None:
    for keyword in (f"{end}{what}" for what in _COUNTED for end in ("min", "max")):
        value = node.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SchemaRefused(f"{path}/{keyword}: expected an integer of at least 0", drops=[keyword])
        if value > MAX_COUNT:
            why = f"{path}/{keyword}: {str(value)[:20]} is more than {MAX_COUNT}"
            raise SchemaRefused(why, "grammar_too_complex", drops=[keyword])
    for what in _COUNTED:
        min_keyword, max_keyword = f"min{what}", f"max{what}"
        if node.get(min_keyword, 0) > node.get(max_keyword, MAX_COUNT):
            raise SchemaRefused(f"{path}: {min_keyword} is more than {max_keyword}", drops=[min_keyword, max_keyword])


def _check_max_properties(node: dict[str, Any], path: str) -> None:
    required = len(set(node.get("required", ())))
    if required > node.get("maxProperties", required):
        why = f"{path}: 'maxProperties' is {node['maxProperties']}, and {required} properties are required"
        raise SchemaRefused(why, drops=["maxProperties"])


def _check_properties(node: dict[str, Any], path: str) -> None:
    required = take_typed(node, "required", list, [], path)
    if not all(isinstance(name, str) for name in required):
        raise SchemaRefused(f"{path}/required: expected a list of strings", drops=["required"])
    properties = take_typed(node, "properties", dict, {}, path)
    unknown = [name for name in required if name not in properties]
    if unknown:
        why = f"{path}/required: {unknown[0][:60]!r} is not among the properties"
        raise SchemaRefused(why, drops=["required"])
    _check_max_properties(node, path)
    patterns = take_typed(node, "patternProperties", dict, {}, path)
    for keyword in ("propertyNames", "patternProperties"):
        if keyword in node and properties:
            raise SchemaRefused(f"{path}: {keyword!r} beside 'properties' is not supported", drops=[keyword])
    if patterns:
        _check_patterns(node, patterns, path)


def _check_patterns(node: dict[str, Any], patterns: dict[str, Any], path: str) -> None:
    drops = ["patternProperties"]
    if len(patterns) > 1:
        raise SchemaRefused(f"{path}: 'patternProperties' of more than one pattern is not supported", drops=drops)
    if "propertyNames" in node or node.get("additionalProperties", False) is not False:
        beside = "propertyNames" if "propertyNames" in node else "additionalProperties"
        raise SchemaRefused(f"{path}: 'patternProperties' beside {beside!r} is not supported", drops=drops)
    try:
        TextRule(next(iter(patterns))).read()
    except ValueError as error:
        raise SchemaRefused(f"{path}/patternProperties: {error}", drops=drops) from None


def _check_min_count(node: dict[str, Any], path: str, min_keyword: str, named: Sized, others: str) -> None:
    """Raise SchemaRefused if a minimum count is higher than what the schema describes: it has no further members
    unless it says so.
    """
    more = node.get("items", True) is not False if others == "items" else allows_other_names(node)
    if node.get(min_keyword, 0) > len(named) and not more:
        raise SchemaRefused(
            f"{path}: {min_keyword!r} is {node[min_keyword]}, but the schema describes {len(named)}. "
            f'Describe the others by {others!r} ("{others}": {{}} lets in any), or lower {min_keyword!r}',
            drops=[min_keyword],
            instead={min_keyword: len(named)} if named else {},
        )


def implied_types(node: Mapping[str, Any]) -> list[str]:
    """Return the types that the keywords of a schema without `type` imply."""
    return [name for name in IMPLIED_TYPES if not node.keys().isdisjoint(TYPE_KEYWORDS[name])]


def allows_other_names(node: Mapping[str, Any]) -> bool:
    """Return whether objects may have properties that the schema does not list: where it says so, and where it says
    nothing about properties.
    """
    if node.get("patternProperties"):
        return True
    unsaid = "propertyNames" in node or node.keys().isdisjoint({*NAMING_KEYWORDS} - {"patternProperties"})
    return node.get("additionalProperties", unsaid) is not False


def type_names(node: dict[str, Any], path: str) -> list[str]:
    given = node.get("type", [])
    names = [given] if isinstance(given, str) else given
    is_supported = isinstance(names, list) and all(isinstance(name, str) and name in PYTHON_TYPES for name in names)
    if not is_supported or ("type" in node and not names):
        raise SchemaRefused(f"{path}/type: {str(given)[:60]!r} is not among {', '.join(PYTHON_TYPES)}", drops=["type"])
    return list(dict.fromkeys(names))  # each name once


def has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, PYTHON_TYPES[name])


def take_typed(node: dict[str, Any], keyword: str, kind: type[Any], default: Any, path: str) -> Any:
    if keyword not in node:
        return default
    if not isinstance(node[keyword], kind):
        raise SchemaRefused(f"{path}/{keyword}: expected {_CALLED[kind]}", drops=[keyword])
    return node[keyword]
