"""Definitions for what the references of a schema lead to, where loosening the schema may move that.

Loosening merges the schemas of an `allOf`, adds keywords to those of a choice and drops others. A pointer to a schema
within them would then lead to nothing, or to a schema that says more. So such a schema is copied, as the client wrote
it, to a definition of its own, which stays where it is. What references lead to is always read from the client's
schema.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .keywords import LISTED_SCHEMAS, SCHEMAS_BY_NAME, SINGLE_SCHEMAS, WHOLE_KEYWORDS
from .references import SchemaPath, split_pointer

DEFINITIONS = ("$defs", "definitions")
_MOVING = {*WHOLE_KEYWORDS, "nullable"}  # keywords of a schema by which the schemas within it may be moved
_STAYING = {"properties": ("object", None), "items": ("array",)}  # keywords that stay beside such a type


@dataclass(frozen=True, slots=True)
class NamedTargets:
    """A schema whose references lead to where nothing is moved.

    schema  a copy of the client's, with further definitions; for `true` and `false` itself
    places  the client's place of each further definition, by the definition's place
    """

    schema: Any
    places: dict[SchemaPath, SchemaPath]


def name_targets(schema: Any, max_objects: int) -> NamedTargets:
    """Return the schema with definitions for the targets that may be moved, while it holds at most `max_objects`
    objects.
    """
    return _Naming(schema, max_objects).named() if isinstance(schema, dict) else NamedTargets(schema, {})


def at_pointer(root: Any, target: str) -> Any:
    """Return the value in a document that a reference leads to; None if there is none."""
    place = _read_pointer(target)
    return None if place is None else _at(root, place)


def _read_pointer(target: str) -> SchemaPath | None:
    if target != "#" and not target.startswith("#/"):
        return None
    try:
        return split_pointer(target)
    except UnicodeDecodeError:
        return None


def _at(root: Any, place: Sequence[str]) -> Any:
    for name in place:
        if isinstance(root, dict):
            root = root.get(name)
        elif isinstance(root, list) and name.isdecimal() and name.isascii():
            root = root[int(name)] if len(name) < 9 and int(name) < len(root) else None
        else:
            return None
    return root


class _Naming:
    """Walk over the schemas of one document, and over the copies that it makes of them."""

    def __init__(self, schema: dict[str, Any], max_objects: int) -> None:
        self._given = schema
        self._objects_left = max_objects - _count_objects(schema)
        self._names: dict[SchemaPath, str | None] = {}
        self._holder = next((name for name in DEFINITIONS if isinstance(schema.get(name, {}), dict)), "")

    def named(self) -> NamedTargets:
        root = copy.deepcopy(self._given)
        copies: dict[str, Any] = {}
        left: list[Any] = [root]
        while left:
            node = left.pop()
            left += _inner_schemas(node)
            if isinstance(target := node.get("$ref"), str) and (name := self._name(target, copies, left)) is not None:
                node["$ref"] = f"#/{self._holder}/{name}"
        if copies:
            root[self._holder] = {**root.get(self._holder, {}), **copies}
        named = ((place, name) for place, name in self._names.items() if name is not None)
        return NamedTargets(root, {(self._holder, name): place for place, name in named})

    def _name(self, target: str, copies: dict[str, Any], left: list[Any]) -> str | None:
        """Return the name of the definition for a reference's target; None: it stays where it is, or cannot be
        copied.
        """
        place = _read_pointer(target)
        if place is None or not self._holder or not _may_move(self._given, place):
            return None
        if place not in self._names:
            self._names[place] = None
            found = _at(self._given, place)
            size = _count_objects(found)
            if isinstance(found, dict | bool) and size <= self._objects_left:
                self._objects_left -= size
                self._names[place] = name = self._unused_name(len(copies))
                copies[name] = copy.deepcopy(found)
                left += [copies[name]] * isinstance(found, dict)
        return self._names[place]

    def _unused_name(self, number: int) -> str:
        taken_names = self._given.get(self._holder, {})
        name = f"target {number}"
        while name in taken_names:
            name += "'"
        return name


def _may_move(root: Any, place: SchemaPath) -> bool:
    """Return whether loosening may move the schema at that place. It moves no definition of the whole document."""
    if len(place) == 2 and place[0] in DEFINITIONS:
        return False
    node, left = (_at(root, place[:2]), place[2:]) if place[:1] and place[0] in DEFINITIONS else (root, place)
    while left:
        keyword = left[0]
        if not isinstance(node, dict) or not _MOVING.isdisjoint(node):
            return True
        if keyword not in _STAYING or node.get("type") not in _STAYING[keyword]:
            return True
        steps = 2 if keyword in SCHEMAS_BY_NAME else 1
        node, left = _at(node, left[:steps]), left[steps:]
    return not isinstance(node, dict | bool)


def _inner_schemas(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas that a schema holds, as far as they are objects."""
    for keyword in SCHEMAS_BY_NAME:
        if isinstance(found := node.get(keyword), dict):
            yield from (inner for inner in found.values() if isinstance(inner, dict))
    for keyword in (*LISTED_SCHEMAS, *SINGLE_SCHEMAS, "additionalItems"):
        found = node.get(keyword)
        yield from (inner for inner in (found if isinstance(found, list) else [found]) if isinstance(inner, dict))


def _count_objects(value: Any) -> int:
    count, left = 0, [value]
    while left:
        value = left.pop()
        count += isinstance(value, dict)
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return count
