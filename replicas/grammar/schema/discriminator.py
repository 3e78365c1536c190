"""Properties by which OpenAPI's `discriminator` distinguishes the alternatives of a union: they are always written.

pydantic reads no alternative without its tag, though its schema does not require a tag that has a default. Requiring
more means writing fewer texts, each of which the schema accepts; and `oneOf` is then distinguished by the tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .keywords import SchemaRefused, format_path
from .references import SchemaPath, SchemaReferences

MAX_STEPS = 20_000  # most alternatives of unions that are looked at, for all discriminators of one document together
_INNER = ("oneOf", "anyOf", "allOf")


def discriminator_properties(
    schemas: Mapping[SchemaPath, Any], references: SchemaReferences
) -> dict[SchemaPath, tuple[str, ...]]:
    """Return the tags that each schema of an object is written with, by its place, whatever union refers to it.

    Alternatives of unions within a union have its tag too. An alternative that does not describe the property, or that
    cannot be written with it, is left as it is. Raises SchemaRefused if there are too many alternatives to look at.
    """
    found: dict[SchemaPath, dict[str, None]] = {}
    seen: set[tuple[SchemaPath, str]] = set()
    for place, node in schemas.items():
        if (name := _tag(node)) is None:
            continue
        left = _alternatives(node, place)
        while left:
            alternative = references.end(left.pop())
            if (alternative, name) in seen:
                continue
            seen.add((alternative, name))
            if len(seen) > MAX_STEPS:
                why = f"{format_path(place)}: telling the members of unions by 'discriminator' takes too long"
                raise _refused(why, place)
            inner = schemas[alternative]
            if isinstance(inner, dict):
                left += _alternatives(inner, alternative)
                if _can_have(inner, name, found.get(alternative, {})):
                    found.setdefault(alternative, {})[name] = None
    return {place: tuple(names) for place, names in found.items()}


def _tag(node: Any) -> str | None:
    hint = node.get("discriminator") if isinstance(node, dict) else None
    name = hint.get("propertyName") if isinstance(hint, dict) else None
    return name if isinstance(name, str) else None


def _alternatives(node: dict[str, Any], place: SchemaPath) -> list[SchemaPath]:
    return [(*place, keyword, str(index)) for keyword in _INNER for index in range(len(node.get(keyword, ())))]


def _can_have(node: dict[str, Any], name: str, others: Mapping[str, None]) -> bool:
    """Return whether the property is described, can have a value, and fits beside the required ones."""
    if node.get("properties", {}).get(name, False) is False:
        return False
    names = {*node.get("required", ()), *others, name}
    max_properties: int = node.get("maxProperties", len(names))
    return len(names) <= max_properties


def _refused(why: str, place: SchemaPath) -> SchemaRefused:
    refused = SchemaRefused(why, "grammar_too_complex", drops=["discriminator"])
    refused.place = place
    return refused
