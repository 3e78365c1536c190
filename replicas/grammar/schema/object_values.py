"""Objects among the values of a schema that is in the grammar library's words: what a tool's arguments may be.

A union may lead back to itself. It then has the values of its other schemas, so each reference is followed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .keywords import LISTED_SCHEMAS, SCHEMAS_BY_NAME, SINGLE_SCHEMAS

_WHOLE = "#"


def has_only_objects(schema: Any) -> bool:
    """Return whether all values of the schema are objects, as far as the types in it show."""
    return all(_says_object(node) for _, node in _union_alternatives(schema))


def objects_of(schema: Any) -> Any:
    """Return a schema of those values that are objects; None if they cannot be told from the others."""
    if has_only_objects(schema):
        return schema
    if not isinstance(schema, dict):
        return None
    schema = _with_whole_named(schema)
    objects = [shown for shown, node in _union_alternatives(schema) if _says_object(node)]
    if not objects:
        return None
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return (objects[0] if len(objects) == 1 else {"anyOf": objects}) | definitions


def _union_alternatives(schema: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the schemas of a union in order, at any depth: each as it stands in the union, and as what it refers to."""
    seen: set[str] = set()
    left = [(schema, schema)]
    while left:
        shown, node = left.pop()
        if not isinstance(node, dict):
            yield shown, node
        elif "$ref" in node:
            if node["$ref"] not in seen:
                seen.add(node["$ref"])
                left.append((shown, _target(schema, node["$ref"])))
        elif (inner := node.get("anyOf", node.get("allOf"))) is not None:
            left += [(each, each) for each in reversed(inner)]
        else:
            yield shown, node


def _target(schema: dict[str, Any], reference: str) -> Any:
    return schema if reference == _WHOLE else schema["$defs"][reference.removeprefix("#/$defs/")]


def _says_object(node: Any) -> bool:
    return isinstance(node, dict) and node.get("type") == "object"


def _with_whole_named(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the same schema with a definition of the whole in the place of `#`, if it refers to that."""
    given = schema.get("$defs", {})
    name = f"#/$defs/{len(given)}"  # the writer of the library's words counts its definitions from 0
    named = _with_references(schema, name)
    if named == schema:
        return schema
    whole = {keyword: value for keyword, value in named.items() if keyword != "$defs"}
    return {**whole, "$defs": {**named.get("$defs", {}), str(len(given)): whole}}


def _with_references(node: Any, name: str) -> Any:
    """Return the schema with `name` for each reference to the whole. Constants and enumerated values stay."""
    if not isinstance(node, dict):
        return node
    found = dict(node)
    if found.get("$ref") == _WHOLE:
        found["$ref"] = name
    for keyword in SCHEMAS_BY_NAME:
        if keyword in found:
            found[keyword] = {key: _with_references(inner, name) for key, inner in found[keyword].items()}
    for keyword in LISTED_SCHEMAS:
        if keyword in found:
            found[keyword] = [_with_references(inner, name) for inner in found[keyword]]
    for keyword in SINGLE_SCHEMAS:
        if keyword in found:
            found[keyword] = _with_references(found[keyword], name)
    return found
