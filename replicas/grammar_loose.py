"""A schema of which what can be kept is kept: for tools that do not ask for more than a model's best.

Only the keyword that cannot be kept goes, at its place; a property that is required stays so, whatever is known of it.
"""

from __future__ import annotations

import copy
from typing import Any
from urllib.parse import unquote

from .grammar_keywords import BY_NAME, LISTED, SINGLE, Refused, check_node, shown
from .grammar_references import Place
from .grammar_schema import MAX_DEPTH, MAX_NODES, words

MAX_MERGED = 8  # references and schemas of allOf within one another
MAX_REPAIRS = 64  # of what shows only when all schemas are seen together

_OF_OBJECTS = {"properties", "required", "type"}
_DEFINITIONS = {"$defs", "definitions"}
_HOLDING = {"properties", "additionalProperties", "patternProperties", "propertyNames"}

__all__ = ["loosened"]


def loosened(schema: dict[str, Any]) -> tuple[Any, list[str]]:
    """The schema in the grammar library's words, and what was left out to get there, each with its place."""
    loose = _Loose(schema)
    try:
        root = loose.schema(copy.deepcopy(schema), (), 0)
    except RecursionError:
        return words(_outline(schema)), ["#: all but the names of its properties"]
    for _ in range(MAX_REPAIRS):
        try:
            return words(root), loose.dropped
        except Refused as refused:
            if not _repair(root, refused):
                break
            loose.note(refused.place, *refused.drops)
    return words(_outline(schema)), ["#: all but the names of its properties"]


class _Loose:
    """Walks one document. dropped: what was left out so far."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.dropped: list[str] = []
        self._count = 0

    def note(self, place: Place, *what: str) -> None:
        self.dropped += [f"{shown(place)}: {keyword!r}" for keyword in what]

    def schema(self, node: Any, place: Place, depth: int) -> Any:
        self._count += 1
        if not isinstance(node, dict | bool) or depth > MAX_DEPTH or self._count > MAX_NODES:
            self.note(place, "the schema")
            return True
        if isinstance(node, bool):
            return node
        may_be_null = node.get("nullable") is True and "type" in node
        if may_be_null:
            del node["nullable"]
        node = self._own(_merged(node, self._root), place)
        self._inner(node, place, depth)
        return _or_null(node) if may_be_null else node

    def _own(self, node: dict[str, Any], place: Place) -> dict[str, Any]:
        """Without the keywords that cannot be kept, whatever the schemas within are."""
        for keyword in sorted(_DEFINITIONS & node.keys()):
            if not isinstance(node[keyword], dict):
                del node[keyword]
                self.note(place, keyword)
        for _ in range(len(node) + 1):
            _name_required(node)
            try:
                check_node(node, shown(place))
            except Refused as refused:
                drops = [keyword for keyword in refused.drops if keyword in node]
                if not drops:
                    break
                self.note(place, *drops)
                for keyword in drops:
                    del node[keyword]
            else:
                return _opened(node)
        self.note(place, *node)
        return {}

    def _inner(self, node: dict[str, Any], place: Place, depth: int) -> None:
        for keyword in BY_NAME:
            for name, inner in node.get(keyword, {}).items():
                node[keyword][name] = self.schema(inner, (*place, keyword, name), depth + 1)
        for keyword in LISTED:
            for index, inner in enumerate(node.get(keyword, [])):
                node[keyword][index] = self.schema(inner, (*place, keyword, str(index)), depth + 1)
        for keyword in SINGLE:
            if keyword in node:
                node[keyword] = self.schema(node[keyword], (*place, keyword), depth + 1)


def _repair(root: Any, refused: Refused) -> bool:
    """Leaves out what was refused, if it is found there."""
    node = root
    for part in refused.place:
        node = node[int(part)] if isinstance(node, list) else node.get(part) if isinstance(node, dict) else None
    drops = [keyword for keyword in refused.drops if isinstance(node, dict) and keyword in node]
    for keyword in drops:
        value = node.pop(keyword)
        if keyword == "oneOf":
            node["anyOf"] = value
    return bool(drops)


def _merged(node: dict[str, Any], root: Any, depth: int = 0) -> dict[str, Any]:
    """Several schemas of `allOf` as one, where they are plain: properties and requirements together."""
    parts = node.get("allOf")
    if not isinstance(parts, list) or not parts or (len(parts) == 1 and node.keys().isdisjoint(_OF_OBJECTS)):
        return node
    merged = {keyword: value for keyword, value in node.items() if keyword != "allOf"}
    for part in parts:
        plain = _plain(part, root, depth)
        if plain is None:
            return node
        for keyword, value in plain.items():
            if keyword == "properties" and isinstance(value, dict):
                merged[keyword] = {**value, **merged.get(keyword, {})}
            elif keyword == "required" and isinstance(value, list):
                merged[keyword] = [
                    *merged.get(keyword, []),
                    *(name for name in value if name not in merged.get(keyword, [])),
                ]
            else:
                merged.setdefault(keyword, value)
    return merged


def _plain(part: Any, root: Any, depth: int) -> dict[str, Any] | None:
    """One that is no choice of others: itself, or what it refers to in the same document."""
    while isinstance(part, dict) and isinstance(target := part.get("$ref"), str) and depth < MAX_MERGED:
        depth += 1
        part = root
        for name in unquote(target.removeprefix("#")).split("/")[1:]:
            part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    if not isinstance(part, dict) or depth >= MAX_MERGED:
        return None
    part = _merged(copy.deepcopy(part), root, depth + 1)
    return part if part.keys().isdisjoint({"$ref", "anyOf", "oneOf", "allOf"}) else None


def _name_required(node: dict[str, Any]) -> None:
    """What is required and not described is a property all the same, of any value."""
    required, properties = node.get("required"), node.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        return
    names = [name for name in required if isinstance(name, str)]
    node["required"] = names
    if unknown := [name for name in names if name not in properties]:
        node["properties"] = {**properties, **dict.fromkeys(unknown, True)}


def _opened(node: dict[str, Any]) -> dict[str, Any]:
    """An object of which nothing is said holds anything."""
    return (
        node | {"additionalProperties": True}
        if node.get("type") == "object" and node.keys().isdisjoint(_HOLDING)
        else node
    )


def _or_null(node: dict[str, Any]) -> dict[str, Any]:
    """As OpenAPI's `nullable` has it."""
    definitions: dict[str, Any] = {
        keyword: node.pop(keyword) for keyword in ("$defs", "definitions") if keyword in node
    }
    return {"anyOf": [node, {"type": "null"}], **definitions}


def _outline(schema: dict[str, Any]) -> dict[str, Any]:
    """An object with the names of its properties, and no more."""
    properties, required = schema.get("properties"), schema.get("required")
    names = [name for name in properties if isinstance(name, str)] if isinstance(properties, dict) else []
    wanted = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    known = list(dict.fromkeys([*names, *wanted]))[: MAX_NODES // 2]
    return {
        "type": "object",
        "properties": dict.fromkeys(known, True),
        "required": [name for name in wanted if name in known],
        "additionalProperties": not known,
    }
