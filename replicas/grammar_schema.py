"""Which JSON Schemas can be kept to. The grammar library drops what it cannot express; here it is refused by name.

The vocabulary is that of draft 2020-12. What is accepted is kept to exactly or more strictly: properties come in
the schema's order, an object has no properties beside those named unless `additionalProperties` says so, a
`pattern` covers the whole string, and a keyword that implies a type makes it so. References lead to schemas of the
same document, and a schema is found only where draft 2020-12 has one.

One thing is not kept to, as the library cannot: where `additionalProperties` lets in other names, one of them may come
twice, which counts twice, or be one of the properties in escapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sized
from fractions import Fraction
from typing import Any

from .errors import InvalidRequest
from .grammar_pattern import FORMAT_PATTERNS, json_pattern
from .grammar_references import BadReference, Place, References, TooManySteps

MAX_DEPTH = 32
MAX_NODES = 4096
MAX_PATTERNS = 65_536  # characters of all patterns together
MAX_COUNT = 10_000  # of items, properties or characters that a bound may ask for
MAX_SHOWN = 60  # characters of each name in a place that is told

_TYPES = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
_ANNOTATIONS = frozenset((
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "discriminator",
    "example", "examples", "readOnly", "title", "writeOnly",
))  # fmt: skip
# Keywords that hold schemas.
_BY_NAME = ("properties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
# Keywords that say which values are meant as a whole: nothing else may narrow the same values.
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "boolean": (),
    "null": (),
}
_KEYWORDS = frozenset(("type", *_WHOLE, *(keyword for group in _OF_TYPE.values() for keyword in group)))
_MARK = "x-which"  # means nothing to the library, but that a schema with another number is another schema
_IMPLIED = ("object", "array")  # types that their keywords alone imply
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_DECIMALS = 6  # of a number within bounds, as the library writes it
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
FORMATS = frozenset((
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uri-reference", "uuid",
))  # fmt: skip
_CALLED: dict[type[Any], str] = {dict: "an object", list: "a list", str: "a string"}
_FORMATS = {name: json_pattern(pattern) for name, pattern in FORMAT_PATTERNS.items()}


class _Refused(Exception):
    """Why, without the field's name."""

    def __init__(self, why: str, code: str = "invalid_grammar") -> None:
        super().__init__(why)
        self.why, self.code = why, code


def check_schema(schema: Any, field: str) -> Any:
    """The schema as the grammar library is to have it: patterns and formats in the words that it takes for the same.

    Raises InvalidRequest naming `field`, the place in the schema and the keyword that cannot be kept to.
    """
    schemas: dict[Place, Any] = {}
    patterns = 0
    try:
        for node, place, depth in _nodes(schema, (), 0):
            if len(schemas) >= MAX_NODES or depth > MAX_DEPTH:
                raise _Refused(f"at most {MAX_NODES} schemas, {MAX_DEPTH} deep, are accepted", "grammar_too_complex")
            schemas[place] = node
            if isinstance(node, bool):
                continue
            _check_node(node, _shown(place))
            patterns += len(node.get("pattern", ""))
            if patterns > MAX_PATTERNS:
                raise _Refused(f"patterns of at most {MAX_PATTERNS} characters are accepted", "grammar_too_complex")
        return _Words(schemas, _checked_references(schemas)).document()
    except _Refused as refused:
        raise InvalidRequest(f"{field}: {refused.why}", param=field, code=refused.code) from None
    except RecursionError:  # in showing a value
        raise InvalidRequest(f"{field}: nested too deeply", param=field, code="grammar_too_complex") from None


def _checked_references(schemas: Mapping[Place, Any]) -> References:
    references = References(schemas)
    for place, node in schemas.items():
        if isinstance(node, dict) and "$ref" in node:
            try:
                references.check(node["$ref"])
            except BadReference as error:
                code = "grammar_too_complex" if isinstance(error, TooManySteps) else "invalid_grammar"
                raise _Refused(f"{_shown(place)}/$ref: {error}", code) from None
    return references


def _nodes(node: Any, place: Place, depth: int) -> Iterator[tuple[Any, Place, int]]:
    """Every schema, outer ones first: a caller may stop before it gets too deep."""
    if not isinstance(node, dict | bool):
        raise _Refused(f"{_shown(place)}: a schema is an object or a boolean, not {type(node).__name__}")
    yield node, place, depth
    if isinstance(node, dict):
        for more, inner in _inner(node, place):
            yield from _nodes(inner, (*place, *more), depth + 1)


def _inner(node: dict[str, Any], place: Place) -> Iterator[tuple[Place, Any]]:
    """The schemas that one holds, and where in it."""
    path = _shown(place)
    for keyword in _BY_NAME:
        for name, inner in _typed(node, keyword, dict, {}, path).items():
            yield (keyword, name), inner
    for keyword in _LISTED:
        for index, inner in enumerate(_typed(node, keyword, list, [], path)):
            yield (keyword, str(index)), inner
    for keyword in _SINGLE:
        if keyword in node:
            yield (keyword,), node[keyword]


def _shown(place: Place) -> str:
    return "/".join(("#", *(part[:MAX_SHOWN] for part in place)))


class _Words:
    """A checked document as the library (xgrammar 0.2.8) is to have it.

    Nothing is handed on that was not looked at: of each schema the keywords alone, and references lead to definitions
    under names of our own, as the library reads of a pointer neither numbers nor escapes nor empty names.
    """

    def __init__(self, schemas: Mapping[Place, Any], references: References) -> None:
        self._schemas = schemas
        self._references = references
        self._said: dict[Place, Any] = {}  # each schema is said once, and may stand at its place and as a definition
        self._names: dict[Place, str] = {}  # of definitions
        self._named: list[Place] = []
        self._marks = 0

    def document(self) -> Any:
        root = self._schema(())
        definitions = {self._names[place]: self._schema(place) for place in self._named}  # each may name more
        return {**root, "$defs": definitions} if definitions else root

    def _schema(self, place: Place) -> Any:
        if place not in self._said:
            node = self._schemas[place]
            self._said[place] = node if isinstance(node, bool) else self._keywords(node, place)
        return self._said[place]

    def _keywords(self, node: dict[str, Any], place: Place) -> dict[str, Any]:
        own = {keyword: value for keyword, value in node.items() if keyword in _KEYWORDS}
        for keyword in own:
            if keyword in _BY_NAME:
                own[keyword] = {name: self._schema((*place, keyword, name)) for name in own[keyword]}
            elif keyword in _LISTED:
                own[keyword] = [self._schema((*place, keyword, str(index))) for index in range(len(own[keyword]))]
            elif keyword in _SINGLE:
                own[keyword] = self._schema((*place, keyword))
        if "type" not in own and own.keys().isdisjoint(_WHOLE):
            own |= [("type", name) for name in _IMPLIED if not own.keys().isdisjoint(_OF_TYPE[name])]
        if "$ref" in own:
            own["$ref"] = self._reference(self._references.place(own["$ref"]))
        if {"enum", "const"}.isdisjoint(own):  # beside them a pattern is refused
            _reword(own, _shown(place))
        if _may_be_mistaken(own):
            self._marks += 1
            own[_MARK] = self._marks
        return own

    def _reference(self, place: Place) -> str:
        if not place:
            return "#"
        if place not in self._names:
            self._names[place] = str(len(self._named))
            self._named.append(place)
        return f"#/$defs/{self._names[place]}"


def _may_be_mistaken(node: dict[str, Any]) -> bool:
    """Whether the library may take the schema for another one, and make one rule of both.

    It tells schemas apart by their text without annotations, their names sorted and not escaped. So it leaves out
    properties that are called as annotations are too, and those within a constant, and loses the properties' order.
    """
    names = list(node.get("properties", ()))
    if names != sorted(names) or any(map(_is_lost, names)):
        return True
    values = [node.get("const"), node.get("enum")]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            if any(map(_is_lost, value)):
                return True
            values += value.values()
        elif isinstance(value, list):
            values += value
    return False


def _is_lost(name: str) -> bool:
    return name in _ANNOTATIONS or '"' in name


def _reword(node: dict[str, Any], path: str) -> None:
    if node.get("format") in _FORMATS:
        node["pattern"] = _FORMATS[node.pop("format")]
    elif "pattern" in node:
        try:
            node["pattern"] = json_pattern(node["pattern"])
        except ValueError as error:
            raise _Refused(f"{path}/pattern: {error}") from None


def _check_node(node: dict[str, Any], path: str) -> None:
    for keyword in node:
        if keyword not in _KEYWORDS and keyword not in _ANNOTATIONS and not keyword.startswith("x-"):
            raise _Refused(f"{path}: the keyword {keyword[:60]!r} is not supported")
    if "$id" in node and path != "#":
        raise _Refused(f"{path}: $id is supported at the top only")
    narrowing = [keyword for keyword in node if keyword in _KEYWORDS]
    whole = next((keyword for keyword in _WHOLE if keyword in node), None)
    if whole in ("enum", "const"):
        _check_values(node, whole, narrowing, path)
    elif whole is not None:
        if len(narrowing) > 1:
            beside = next(keyword for keyword in narrowing if keyword != whole)
            raise _Refused(f"{path}: {beside!r} beside {whole!r} is not supported")
        if whole != "$ref" and not _typed(node, whole, list, [], path):
            raise _Refused(f"{path}: {whole!r} is empty")
        if whole == "allOf" and len(node["allOf"]) > 1:
            raise _Refused(f"{path}: 'allOf' of more than one schema is not supported")
    else:
        _check_types(node, narrowing, path)


def _check_values(node: dict[str, Any], whole: str, narrowing: list[str], path: str) -> None:
    for keyword in narrowing:
        if keyword not in (whole, "type"):
            raise _Refused(f"{path}: {keyword!r} beside {whole!r} is not supported")
    values = _typed(node, "enum", list, [], path) if whole == "enum" else [node["const"]]
    if not values:
        raise _Refused(f"{path}: 'enum' is empty")
    names = _type_names(node, path)
    for value in values:
        _check_integers(value, path, whole)
        if "type" in node and not any(_is_type(value, name) for name in names):
            raise _Refused(f"{path}: the {whole} {str(value)[:40]!r} is not of type {str(node['type'])[:40]}")


def _check_types(node: dict[str, Any], narrowing: list[str], path: str) -> None:
    names = _type_names(node, path)
    for keyword in narrowing:
        if keyword == "type" or any(keyword in _OF_TYPE[name] for name in names):
            continue
        if names:
            raise _Refused(f"{path}: {keyword!r} is not supported for type {', '.join(names)}")
        if not any(keyword in _OF_TYPE[name] for name in _IMPLIED):
            raise _Refused(f"{path}: {keyword!r} needs a 'type' beside it")
    if not names and {keyword in _OF_TYPE["object"] for keyword in narrowing} == {True, False}:
        raise _Refused(f"{path}: keywords of objects and of arrays need a 'type' beside them")
    if len(names) > 1 and "multipleOf" in node:
        raise _Refused(f"{path}: 'multipleOf' is supported for type integer alone")
    _check_strings(node, path)
    _check_counts(node, path)
    if "number" in names:
        _check_bounds(node, path)
    _check_required(node, path)
    _check_least(node, path, "minProperties", _typed(node, "properties", dict, {}, path), "additionalProperties")
    _check_least(node, path, "minItems", _typed(node, "prefixItems", list, [], path), "items")


def _check_strings(node: dict[str, Any], path: str) -> None:
    given = [keyword for keyword in ("pattern", "format") if keyword in node]
    if len(given) > 1 or (given and ("minLength" in node or "maxLength" in node)):
        raise _Refused(f"{path}: of pattern, format and the lengths only one can be kept to")
    if "format" in node and _typed(node, "format", str, "", path) not in FORMATS:
        raise _Refused(f"{path}: format {str(node['format'])[:40]!r} is none of {', '.join(sorted(FORMATS))}")
    _typed(node, "pattern", str, "", path)


def _check_integers(value: Any, path: str, whole: str) -> None:
    """The library reads what is beyond 64 bits as a double, and would write another number."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, int) and not -(2**63) <= value < 2**63 and not _is_double(value):
            raise _Refused(f"{path}: the {whole} {str(value)[:40]} is more than a double can tell")


def _check_bounds(node: dict[str, Any], path: str) -> None:
    """Of numbers the library writes six decimals: where none of those lies within, it would write nothing at all."""
    bounds = {keyword: node[keyword] for keyword in _BOUNDS if keyword in node}
    for keyword, value in bounds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _Refused(f"{path}/{keyword}: expected a number")
        if not (math.isfinite(value) if isinstance(value, float) else _is_double(value)):
            raise _Refused(f"{path}/{keyword}: {str(value)[:40]} is more than a double can tell")
    steps = {keyword: Fraction(str(value)) * 10**_DECIMALS for keyword, value in bounds.items()}
    least = [math.ceil(steps[key]) for key in ("minimum",) if key in steps]
    least += [math.floor(steps[key]) + 1 for key in ("exclusiveMinimum",) if key in steps]
    most = [math.floor(steps[key]) for key in ("maximum",) if key in steps]
    most += [math.ceil(steps[key]) - 1 for key in ("exclusiveMaximum",) if key in steps]
    if least and most and max(least) > min(most):
        raise _Refused(f"{path}: no number of {_DECIMALS} decimals lies within its bounds")


def _is_double(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _check_counts(node: dict[str, Any], path: str) -> None:
    for keyword in _COUNTS:
        value = node.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _Refused(f"{path}/{keyword}: expected an integer of at least 0")
        if value > MAX_COUNT:
            raise _Refused(f"{path}/{keyword}: {str(value)[:20]} is more than {MAX_COUNT}", "grammar_too_complex")


def _check_required(node: dict[str, Any], path: str) -> None:
    required = _typed(node, "required", list, [], path)
    if not all(isinstance(name, str) for name in required):
        raise _Refused(f"{path}/required: expected a list of strings")
    properties = _typed(node, "properties", dict, {}, path)
    unknown = [name for name in required if name not in properties]
    if unknown:
        raise _Refused(f"{path}/required: {unknown[0][:60]!r} is not among the properties")


def _check_least(node: dict[str, Any], path: str, least: str, named: Sized, others: str) -> None:
    """As many as are asked for must be let in: beside those named there are none unless the schema says so."""
    if node.get(least, 0) > len(named) and node.get(others, False) is False:
        raise _Refused(
            f"{path}/{least}: {node[least]} is more than the {len(named)} there are; {others!r} lets in others"
        )


def _type_names(node: dict[str, Any], path: str) -> list[str]:
    given = node.get("type", [])
    names = [given] if isinstance(given, str) else given
    known = isinstance(names, list) and all(isinstance(name, str) and name in _TYPES for name in names)
    if not known or ("type" in node and not names):
        raise _Refused(f"{path}/type: {str(given)[:60]!r} is not among {', '.join(_TYPES)}")
    return list(dict.fromkeys(names))  # all values are held to each of them


def _is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])  # type: ignore[arg-type]


def _typed(node: dict[str, Any], keyword: str, kind: type[Any], default: Any, path: str) -> Any:
    value = node.get(keyword, default)
    if not isinstance(value, kind):
        raise _Refused(f"{path}/{keyword}: expected {_CALLED[kind]}")
    return value
