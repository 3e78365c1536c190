"""Dialects of JSON Schema, as OpenAPI, Google's clients and Python's tools write it, and their translation to JSON
Schema.

They are accepted where a schema is not `strict`. Type names may be OpenAPI's in capitals (google.genai.types.Type), and
Python's as the functions of the Berkeley Function-Calling Leaderboard have them.
"""

from __future__ import annotations

from typing import Any

from .keywords import PYTHON_TYPES

_JSON_TYPE_NAMES = {
    "bool": "boolean",
    "dict": "object",
    "double": "number",
    "float": "number",
    "int": "integer",
    "list": "array",
    "none": "null",
    "str": "string",
    "tuple": "array",
}


def in_json_schema(node: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its own keywords as draft 2020-12 has them; what is of no known dialect stays."""
    return _with_open_bounds(_with_listed_items(_with_json_types(node)))


def _with_listed_items(node: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `prefixItems` for the list of schemas that draft 7 has in `items`."""
    listed = node.get("items")
    if not isinstance(listed, list) or "prefixItems" in node:
        return node
    others = {key: value for key, value in node.items() if key not in ("items", "additionalItems")}
    rest = {"items": node["additionalItems"]} if "additionalItems" in node else {}
    return others | ({"prefixItems": listed} if listed else {}) | rest


def _with_open_bounds(node: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with bounds that are not reached as numbers; OpenAPI 3.0 has them as `true` beside a bound."""
    for bound, open_bound in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if node.get(open_bound) is False:
            node = {key: value for key, value in node.items() if key != open_bound}
        elif node.get(open_bound) is True and bound in node:
            node = {key: value for key, value in node.items() if key != bound} | {open_bound: node[bound]}
    return node


def _with_json_types(node: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its own types under JSON Schema's names; a name of no known dialect stays."""
    given = node.get("type")
    if isinstance(given, str):
        return {**node, "type": _json_type(given)}
    return {**node, "type": [_json_type(name) for name in given]} if isinstance(given, list) else node


def _json_type(name: Any) -> Any:
    if not isinstance(name, str) or name in PYTHON_TYPES:
        return name
    lower = name.lower()
    return lower if lower in PYTHON_TYPES else _JSON_TYPE_NAMES.get(lower, name)


def is_nullable(node: dict[str, Any]) -> bool:
    """Return whether OpenAPI's `nullable` allows null beside the schema's type."""
    return node.get("nullable") is True and "type" in node


def allow_null(node: dict[str, Any]) -> dict[str, Any]:
    """Return a schema for the given one or null, with its definitions at the top, where references find them."""
    definitions: dict[str, Any] = {
        keyword: node.pop(keyword) for keyword in ("$defs", "definitions") if keyword in node
    }
    return {"anyOf": [node, {"type": "null"}], **definitions}
