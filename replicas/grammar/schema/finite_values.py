"""Values of schemas that allow only a few, and lists of such values without repetition."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from .references import SchemaPath, SchemaReferences

MAX_LISTS = 1024
_BOUNDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_SIZES: Mapping[str, tuple[type[Any], Callable[[Any, Any], bool]]] = {
    f"{end}{what}": (kind, holds)
    for what, kind in (("Length", str), ("Items", list), ("Properties", dict))
    for end, holds in (("min", operator.ge), ("max", operator.le))
}


def finite_values(
    place: SchemaPath, schemas: Mapping[SchemaPath, Any], references: SchemaReferences
) -> list[Any] | None:
    """Return the values of a schema that names them, perhaps by reference; None for any other schema."""
    node = references.follow(place)
    if not isinstance(node, dict):
        return None
    if "const" in node:
        return [node["const"]]
    if "enum" in node:
        return list({canonical_text(value): value for value in node["enum"]}.values())
    return [False, True] if node.get("type") == "boolean" else [None] if node.get("type") == "null" else None


def unique_lists(values: list[Any], min_items: int, max_items: int | None) -> list[list[Any]] | None:
    """Return the lists of `min_items` to `max_items` of these values without repetition: in any order, or if those
    are too many, in the given order. None: there are too many.
    """
    sizes = range(min_items, len(values) + 1 if max_items is None else min(max_items, len(values)) + 1)
    for count, lists in ((math.perm, itertools.permutations), (math.comb, itertools.combinations)):
        if all(so_far <= MAX_LISTS for so_far in itertools.accumulate(count(len(values), size) for size in sizes)):
            return [list(found) for size in sizes for found in lists(values, size)]
    return None


def within_bounds(node: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of an `enum` or `const` with those of its values that are within the bounds beside them, and
    without these bounds. One that no value is within stays as it is.
    """
    keyword = next((keyword for keyword in ("const", "enum") if keyword in node), None)
    values = node["enum"] if keyword == "enum" else [node.get("const")]
    bounds = {name: value for name, value in node.items() if name in (*_BOUNDS, *_SIZES) and _is_number(value)}
    if keyword is None or not isinstance(values, list) or not bounds:
        return node
    admitted = [value for value in values if all(_is_within(value, *bound) for bound in bounds.items())]
    if not admitted:
        return node
    others = {name: value for name, value in node.items() if name not in bounds}
    return others | ({"enum": admitted} if keyword == "enum" else {})


def _is_within(value: Any, name: str, bound: float) -> bool:
    """Return whether a bound allows the value; it says nothing about values of other types."""
    if name in _BOUNDS:
        return not _is_number(value) or _BOUNDS[name](value, bound)
    kind, holds = _SIZES[name]
    return not isinstance(value, kind) or holds(len(value), bound)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def canonical_text(value: Any) -> str:
    """Return the same text for values that JSON Schema takes for equal: 1 and 1.0, and objects whatever their order."""
    return json.dumps(_whole_numbers(value), sort_keys=True)


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole_numbers(inner) for name, inner in value.items()}
    return [_whole_numbers(inner) for inner in value] if isinstance(value, list) else value
