"""Values of schemas that allow only a few, and lists of such values without repetition."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from .references import SchemaPath, SchemaReferences

MAX_LISTS = 1024


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


def unique_lists(values: list[Any], least: int, most: int | None) -> list[list[Any]] | None:
    """Return the lists of `least` to `most` of these values without repetition: in any order, or if those are too many,
    in the given order. None: there are too many.
    """
    sizes = range(least, len(values) + 1 if most is None else min(most, len(values)) + 1)
    for count, lists in ((math.perm, itertools.permutations), (math.comb, itertools.combinations)):
        if all(so_far <= MAX_LISTS for so_far in itertools.accumulate(count(len(values), size) for size in sizes)):
            return [list(found) for size in sizes for found in lists(values, size)]
    return None


def canonical_text(value: Any) -> str:
    """Return the same text for values that JSON Schema takes for equal: 1 and 1.0, and objects whatever their order."""
    return json.dumps(_whole_numbers(value), sort_keys=True)


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole_numbers(inner) for name, inner in value.items()}
    return [_whole_numbers(inner) for inner in value] if isinstance(value, list) else value
