"""Whether the schemas of a `oneOf` exclude one another, by what they require: a small proof, sound and not complete.

What one schema lets a model write must be valid by none of the others. The first is stricter than the schema says (no
properties beside those named), the second is as JSON Schema has it, so they are not read alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .grammar_keywords import IMPLIED, OF_TYPE, TYPES, Refused, is_type, shown
from .grammar_references import Place, References
from .grammar_sets import identity

MAX_STEPS = 20_000  # of one document's proofs together


class Disjoint:
    """Proves of one document's schemas. Places stand for schemas."""

    def __init__(self, schemas: Mapping[Place, Any], references: References) -> None:
        self._schemas = schemas
        self._references = references
        self._known: dict[tuple[Place, Place], bool] = {}
        self._steps = 0

    def check(self, place: Place) -> None:
        """Raises Refused unless the schemas of the `oneOf` there exclude one another."""
        options = [(*place, "oneOf", str(index)) for index in range(len(self._schemas[place]["oneOf"]))]
        for one, written in enumerate(options):
            for other, read in enumerate(options):
                if one != other and not self._excludes(written, read):
                    raise Refused(
                        f"{shown(place)}/oneOf: a value of schema {one} may be one of schema {other} as well; "
                        "supported are schemas of different types or constants, or whose required properties "
                        "differ; anyOf asks for no difference",
                        drops=["oneOf"],
                    )

    def _excludes(self, written: Place, read: Place) -> bool:
        """Whether nothing that follows the schema at `written`, as it is kept to, is valid by the one at `read`."""
        pair = (written, read)
        if pair not in self._known:
            self._count()
            self._known[pair] = False  # in a circle nothing is proved
            self._known[pair] = self._proves(written, read)
        return self._known[pair]

    def _count(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            why = "telling the schemas of oneOf apart takes too long"
            raise Refused(why, "grammar_too_complex", drops=["oneOf"])

    def _proves(self, written: Place, read: Place) -> bool:
        written, read = self._references.end(written), self._references.end(read)
        one, other = self._schemas[written], self._schemas[read]
        if one is False or other is False:
            return True
        if one is True or other is True:
            return False
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in one:
                return all(self._excludes(place, read) for place in _listed(written, one, keyword))
            if keyword in other:
                return all(self._excludes(written, place) for place in _listed(read, other, keyword))
        if (values := _values(one)) is not None:
            return all(self._is_invalid(value, read) for value in values)
        if (values := _values(other)) is not None:
            return all(self._is_invalid(value, written) for value in values)
        return all(
            not _overlap(mine, theirs) or self._type_excludes(mine, written, read)
            for mine in _types(one, implied=True)
            for theirs in _types(other)
        )

    def _type_excludes(self, name: str, written: Place, read: Place) -> bool:
        one, other = self._schemas[written], self._schemas[read]
        match name:
            case "object":
                return self._object_excludes(written, read)
            case "array":
                return _apart(one, other, "minItems", "maxItems") or self._items_exclude(written, read)
            case "string":
                return _apart(one, other, "minLength", "maxLength")
            case "integer" | "number":
                return _apart(one, other, "minimum", "maximum")
        return False

    def _object_excludes(self, written: Place, read: Place) -> bool:
        one, other = self._schemas[written], self._schemas[read]
        mine, theirs = one.get("properties", {}), other.get("properties", {})
        open_ended = one.get("additionalProperties", False) is not False or "patternProperties" in one
        needed = set(other.get("required", ()))
        if not open_ended and needed - mine.keys():
            return True
        closed = other.get("additionalProperties", True) is False and "patternProperties" not in other
        if closed and set(one.get("required", ())) - theirs.keys():
            return True
        return any(
            self._excludes((*written, "properties", name), (*read, "properties", name))
            for name in mine.keys() & theirs.keys()
            if name in needed or name in one.get("required", ())
        )

    def _items_exclude(self, written: Place, read: Place) -> bool:
        one, other = self._schemas[written], self._schemas[read]
        count = min(one.get("minItems", 0), *(len(node.get("prefixItems", ())) for node in (one, other)))
        return any(
            self._excludes((*written, "prefixItems", str(index)), (*read, "prefixItems", str(index)))
            for index in range(count)
        )

    def _is_invalid(self, value: Any, place: Place) -> bool:
        """Whether the value is surely not one of the schema there."""
        self._count()
        place = self._references.end(place)
        node = self._schemas[place]
        if isinstance(node, bool):
            return not node
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in node:
                return all(self._is_invalid(value, inner) for inner in _listed(place, node, keyword))
        if (values := _values(node)) is not None and identity(value) not in map(identity, values):
            return True
        if not any(is_type(value, name) for name in _types(node)):
            return True
        if not isinstance(value, dict):
            return False
        named = node.get("properties", {})
        extra = value.keys() - named.keys()
        closed = node.get("additionalProperties", True) is False and "patternProperties" not in node
        if set(node.get("required", ())) - value.keys() or (closed and extra):
            return True
        return any(self._is_invalid(value[name], (*place, "properties", name)) for name in value.keys() & named.keys())


def _listed(place: Place, node: dict[str, Any], keyword: str) -> Iterator[Place]:
    return ((*place, keyword, str(index)) for index in range(len(node[keyword])))


def _values(node: dict[str, Any]) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    return list(node["enum"]) if "enum" in node else None


def _types(node: dict[str, Any], *, implied: bool = False) -> list[str]:
    """Of the values that are valid; `implied`: of those that are written, which keywords hold to their type."""
    given = node.get("type")
    if given is None:
        found = [name for name in IMPLIED if implied and not node.keys().isdisjoint(OF_TYPE[name])]
        return found or list(TYPES)
    return [given] if isinstance(given, str) else list(given)


def _overlap(one: str, other: str) -> bool:
    return one == other or {one, other} == {"integer", "number"}


def _apart(one: dict[str, Any], other: dict[str, Any], least: str, most: str) -> bool:
    """Whether the bounds of one end before the other's begin."""
    return any(most in low and least in high and low[most] < high[least] for low, high in ((one, other), (other, one)))
