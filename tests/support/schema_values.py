"""Random schemas, and which of some values a validator of JSON Schema takes by them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 4, 6, 12, -1, 1.0, 2.5, "", "a", "ab", "abc", "b", "1", "2024-01-01", [], [1], ["a"],
    [1, 1], [1, 2], ["a", 1], [1, "a"], ["a", "b", "c"], [None], {}, {"a": 1}, {"a": "a"}, {"b": 1}, {"a": 1, "b": 1},
    {"a": "a", "b": "b"}, {"a": 1, "c": "ab"}, {"a": 1, "b": 2, "c": 3}, {"ab": None},
]  # fmt: skip

TYPES = ["string", "number", "integer", "array", "object", "null", "boolean"]
SIMPLE: list[Any] = [{}, True, False, {"type": "string"}, {"type": "integer"}, {"const": 1}, {"maxLength": 1}]
SAID: dict[str, Callable[[random.Random], Any]] = {
    "type": lambda draw: draw.choice([draw.choice(TYPES), draw.sample(TYPES, draw.randint(1, 3))]),
    "enum": lambda draw: draw.sample(VALUES, draw.randint(1, 4)),
    "const": lambda draw: draw.choice(VALUES),
    **{f"{end}{what}": lambda draw: draw.randint(0, 3)
       for end in ("min", "max") for what in ("Length", "Items", "Properties")},
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        lambda draw: draw.choice([-1, 0, 1, 2, 2.5, 3, 4.0, 6]),
    ),
    "multipleOf": lambda draw: draw.choice([1, 2, 3, 4, 0.5]),
    "pattern": lambda draw: draw.choice(["^a", "b$"]),
    "uniqueItems": lambda draw: draw.choice([True, False]),
    "items": lambda draw: draw.choice(SIMPLE),
    "prefixItems": lambda draw: draw.choices(SIMPLE, k=draw.randint(1, 2)),
    "properties": lambda draw: {name: draw.choice(SIMPLE) for name in draw.sample("abc", draw.randint(0, 2))},
    "patternProperties": lambda draw: {draw.choice(["^a", "b$"]): draw.choice(SIMPLE)},
    "additionalProperties": lambda draw: draw.choice(SIMPLE),
    "propertyNames": lambda draw: draw.choice([{"maxLength": 1}, {"enum": ["a", "b"]}]),
    "required": lambda draw: draw.sample("abc", draw.randint(0, 2)),
}  # fmt: skip


def part(draw: random.Random, group: Sequence[str]) -> dict[str, Any]:
    return {keyword: SAID[keyword](draw) for keyword in draw.sample(group, draw.randint(1, 3))}


def takes(schema: Any) -> list[Any]:
    validator = jsonschema_rs.Draft202012Validator(schema)
    return [value for value in VALUES if validator.is_valid(value)]


KEYWORDS = list(SAID)
GROUPS = [KEYWORDS[:7], KEYWORDS[3:15], KEYWORDS[15:18], KEYWORDS[17:], KEYWORDS]  # of what says something together
