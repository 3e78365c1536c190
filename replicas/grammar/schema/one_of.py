"""Proof that the schemas of a `oneOf` exclude one another, from what they require: a small proof, sound and not
complete.

A text that one schema lets a model write must be valid by none of the others. The writing schema is stricter than it
says (no properties beside those named), while validity is as JSON Schema defines it, so the two are read differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .finite_values import canonical_text
from .keywords import (
    PYTHON_TYPES,
    SchemaRefused,
    allows_other_names,
    format_path,
    has_type,
    implied_types,
    integer_bounds,
)
from .references import SchemaPath, SchemaReferences

MAX_STEPS = 20_000  # most steps of one document's proofs together
_VALUES_A_STEP = 32  # values that are sorted in the time of one step
_UNIONS = ("anyOf", "oneOf")
_SIZED = ((str, "Length"), (list, "Items"), (dict, "Properties"))
# Keyword of an end, keyword of a beginning, and whether that excludes the number itself.
_ENDS = (
    ("maximum", "minimum", False),
    ("maximum", "exclusiveMinimum", True),
    ("exclusiveMaximum", "minimum", True),
    ("exclusiveMaximum", "exclusiveMinimum", True),
)
_OF_FEW: Mapping[str, tuple[bool | None, ...]] = {"boolean": (False, True), "null": (None,)}


@dataclass(frozen=True, slots=True)
class _UnionAlternative:
    """A schema that is no reference and no union, and belongs to the option `owner` of a `oneOf`."""

    owner: int
    place: SchemaPath
    reads: frozenset[str]  # types of the values that are valid, integers being numbers
    writes: frozenset[str]  # types of the values that are written
    values: frozenset[str] | None  # all of its values, if it names them


class DisjointnessProof:
    """Prover for the schemas of one document. Schemas are identified by their places."""

    def __init__(
        self,
        schemas: Mapping[SchemaPath, Any],
        references: SchemaReferences,
        tags: Mapping[SchemaPath, Sequence[str]] | None = None,
    ) -> None:
        """Prepare proofs. tags: properties that are always written, though the schema at that place need not require
        them.
        """
        self._schemas = schemas
        self._references = references
        self._written_tags = tags or {}
        self._proved: dict[tuple[SchemaPath, SchemaPath], bool] = {}
        self._ends: dict[SchemaPath, SchemaPath] = {}
        self._named: dict[SchemaPath, frozenset[str] | None] = {}
        self._tags: dict[SchemaPath, frozenset[str] | None] = {}
        self._steps = 0

    def check(self, place: SchemaPath) -> None:
        """Raise SchemaRefused unless the schemas of the `oneOf` at that place exclude one another.

        Schemas that differ by constants or tags are sorted by them, and only the others are compared pair by pair.
        """
        node = self._schemas[place]
        hint = node.get("discriminator")
        hint = hint.get("propertyName") if isinstance(hint, dict) else None
        alternatives = [
            alternative
            for owner, option in enumerate(_listed(place, node, "oneOf"))
            for alternative in self._alternatives(option, owner)
        ]
        for written, read in self._doubtful(alternatives, hint):
            if not self._excludes(written.place, read.place):
                raise SchemaRefused(
                    f"{format_path(place)}/oneOf: a value of schema {written.owner} "
                    f"may be one of schema {read.owner} as "
                    "well; supported are schemas of different types or constants, or whose required properties "
                    "differ; anyOf asks for no difference",
                    drops=["oneOf"],
                )

    def _alternatives(self, option: SchemaPath, owner: int = 0) -> list[_UnionAlternative]:
        found: list[_UnionAlternative] = []
        seen, around = set[SchemaPath](), set[SchemaPath]()

        def add(place: SchemaPath) -> None:
            place = self._end(place)
            node = self._schemas[place]
            keyword = next((word for word in _UNIONS if isinstance(node, dict) and word in node), None)
            if place in around or (place not in seen and keyword is None and node is not False):
                found.append(self._alternative(place, owner))
            elif place not in seen and keyword is not None:
                around.add(place)
                for inner in _listed(place, node, keyword):
                    add(inner)
                around.remove(place)
            seen.add(place)
            self._count()

        add(option)
        return found

    def _alternative(self, place: SchemaPath, owner: int) -> _UnionAlternative:
        node = self._schemas[place]
        if not isinstance(node, dict) or not node.keys().isdisjoint((*_UNIONS, "allOf")):
            return _UnionAlternative(
                owner, place, frozenset(map(_kind, PYTHON_TYPES)), frozenset(map(_kind, PYTHON_TYPES)), None
            )
        if (values := self._values(place)) is not None:
            kinds = frozenset(
                _kind(name) for name in PYTHON_TYPES for value in _values(node) or () if has_type(value, name)
            )
            return _UnionAlternative(owner, place, kinds, kinds, values)
        reads, writes = _types(node), _types(node, implied=True)
        return _UnionAlternative(owner, place, frozenset(map(_kind, reads)), frozenset(map(_kind, writes)), None)

    def _end(self, place: SchemaPath) -> SchemaPath:
        """Return the place where references end, and schemas that consist of nothing but another schema."""
        if place not in self._ends:
            end, seen = self._references.end(place), set[SchemaPath]()
            while isinstance(node := self._schemas[end], dict) and "allOf" in node and end not in seen:
                seen.add(end)
                end = self._references.end((*end, "allOf", "0"))
            self._ends[place] = end
        return self._ends[place]

    def _values(self, place: SchemaPath) -> frozenset[str] | None:
        """Return the values that the schema at that place names itself, as texts; None if it names none."""
        if place not in self._named:
            node = self._schemas[place]
            values = _values(node) if isinstance(node, dict) else None
            self._named[place] = None if values is None else frozenset(map(_constant_text, values))
        return self._named[place]

    def _tag(self, place: SchemaPath) -> frozenset[str] | None:
        """Return all values of the schema at that place, if it or the schemas it leads to name them."""
        place = self._end(place)
        if place not in self._tags:
            found = [alternative.values for alternative in self._alternatives(place)]
            named = [values for values in found if values is not None]
            self._tags[place] = frozenset().union(*named) if len(named) == len(found) else None
        return self._tags[place]

    def _doubtful(
        self, alternatives: list[_UnionAlternative], hint: Any
    ) -> Iterator[tuple[_UnionAlternative, _UnionAlternative]]:
        """Yield pairs (written, read) of alternatives that types, constants and tags do not distinguish at once."""
        constants = [alternative for alternative in alternatives if alternative.values is not None]
        others = [alternative for alternative in alternatives if alternative.values is None]
        for same in self._by_value((alternative, alternative.values or frozenset()) for alternative in constants):
            yield from _pairs(same, same)
        for kind in sorted(set(map(_kind, PYTHON_TYPES))):
            named, left = ([each for each in group if kind in each.reads] for group in (constants, others))
            write = [alternative for alternative in left if kind in alternative.writes]
            yield from _pairs(named, left)
            yield from _pairs(write, named)
            if kind == "object":
                yield from self._objects(write, hint, frozenset())
                yield from _pairs(write, [alternative for alternative in left if kind not in alternative.writes])
            else:
                yield from _pairs(write, left)

    def _objects(
        self, alternatives: list[_UnionAlternative], hint: Any, used: frozenset[str]
    ) -> Iterator[tuple[_UnionAlternative, _UnionAlternative]]:
        """Yield doubtful pairs of objects: sorted by a required property whose values are named, and those alike by
        another one.
        """
        tagged: dict[str, list[tuple[_UnionAlternative, frozenset[str]]]] = {}
        for alternative in alternatives:
            for name, values in self._tags_of(alternative):
                if name not in used:
                    tagged.setdefault(name, []).append((alternative, values))
        differ = {name: len({values for _, values in found}) for name, found in tagged.items()}
        name = max(differ, key=lambda name: (differ[name] > 1 and name == hint, differ[name]), default="")
        if differ.get(name, 0) < 2:
            yield from _pairs(alternatives, alternatives)
            return
        places = {alternative.place for alternative, _ in tagged[name]}
        left = [alternative for alternative in alternatives if alternative.place not in places]
        yield from _pairs(left, alternatives)
        yield from _pairs([alternative for alternative in alternatives if alternative.place in places], left)
        for same in self._by_value(tagged[name]):
            yield from self._objects(same, hint, used | {name})

    def _tags_of(self, alternative: _UnionAlternative) -> Iterator[tuple[str, frozenset[str]]]:
        node = self._schemas[alternative.place]
        if isinstance(node, dict):
            for name in self._written_names(alternative.place):
                self._count()
                if (values := self._tag((*alternative.place, "properties", name))) is not None:
                    yield name, values

    def _by_value(self, found: Iterable[tuple[_UnionAlternative, frozenset[str]]]) -> list[list[_UnionAlternative]]:
        """Return groups of alternatives of different owners that have a value in common."""
        groups: dict[str, list[_UnionAlternative]] = {}
        for alternative, values in found:
            self._count(1 + len(values) // _VALUES_A_STEP)
            for value in values:
                groups.setdefault(value, []).append(alternative)
        several = (group for group in groups.values() if len({alternative.owner for alternative in group}) > 1)
        return list({tuple((each.owner, each.place) for each in group): group for group in several}.values())

    def _excludes(self, written: SchemaPath, read: SchemaPath) -> bool:
        """Return whether no text that is written by the schema at `written` is valid by the schema at `read`."""
        pair = (written, read)
        if pair not in self._proved:
            self._count()
            self._proved[pair] = False  # in a circle nothing is proved
            self._proved[pair] = self._proves(written, read)
        return self._proved[pair]

    def _count(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            why = "telling the schemas of oneOf apart takes too long"
            raise SchemaRefused(why, "grammar_too_complex", drops=["oneOf"])

    def _proves(self, written: SchemaPath, read: SchemaPath) -> bool:
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
            not _overlap(mine, theirs) or self._type_excludes({mine, theirs}, written, read)
            for mine in _types(one, implied=True)
            for theirs in _types(other)
        )

    def _type_excludes(self, names: set[str], written: SchemaPath, read: SchemaPath) -> bool:
        one, other = self._schemas[written], self._schemas[read]
        if not names.isdisjoint(("integer", "number")):
            return _numbers_apart(one, other, whole="integer" in names)
        if "object" in names:
            return self._object_excludes(written, read)
        if "array" in names:
            return _bounds_apart(one, other, "minItems", "maxItems") or self._items_exclude(written, read)
        return "string" in names and _bounds_apart(one, other, "minLength", "maxLength")

    def _object_excludes(self, written: SchemaPath, read: SchemaPath) -> bool:
        one, other = self._schemas[written], self._schemas[read]
        mine, theirs = one.get("properties", {}), other.get("properties", {})
        needed = set(other.get("required", ()))
        if not allows_other_names(one) and needed - mine.keys():
            return True
        closed = other.get("additionalProperties", True) is False and "patternProperties" not in other
        always = self._written_names(written)
        if closed and always.keys() - theirs.keys():
            return True
        return any(
            self._excludes((*written, "properties", name), (*read, "properties", name))
            for name in mine.keys() & theirs.keys()
            if name in needed or name in always
        )

    def _written_names(self, place: SchemaPath) -> dict[str, None]:
        """Return the properties that every text of the object at that place has, in order."""
        return dict.fromkeys([*self._schemas[place].get("required", ()), *self._written_tags.get(place, ())])

    def _items_exclude(self, written: SchemaPath, read: SchemaPath) -> bool:
        """Return whether an item that either schema requires cannot be valid by both. Items behind `prefixItems` are
        all alike.
        """
        one, other = self._schemas[written], self._schemas[read]
        count = max(node.get("minItems", 0) for node in (one, other))
        differ = 1 + max(len(node.get("prefixItems", ())) for node in (one, other))
        for index in range(min(count, differ)):
            mine, theirs = _item(written, one, index), _item(read, other, index)
            if mine is not None and theirs is not None and self._excludes(mine, theirs):
                return True
        return False

    def _is_invalid(self, value: Any, place: SchemaPath) -> bool:
        """Return whether the value is surely not valid by the schema at that place."""
        self._count()
        place = self._references.end(place)
        node = self._schemas[place]
        if isinstance(node, bool):
            return not node
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in node:
                return all(self._is_invalid(value, inner) for inner in _listed(place, node, keyword))
        if (values := self._values(place)) is not None and _constant_text(value) not in values:
            return True
        if not any(has_type(value, name) for name in _types(node)) or _is_beyond(value, node):
            return True
        if isinstance(value, list):
            items = ((item, _item(place, node, index)) for index, item in enumerate(value))
            return any(inner is not None and self._is_invalid(item, inner) for item, inner in items)
        if not isinstance(value, dict):
            return False
        named = node.get("properties", {})
        extra = value.keys() - named.keys()
        closed = node.get("additionalProperties", True) is False and "patternProperties" not in node
        if set(node.get("required", ())) - value.keys() or (closed and extra):
            return True
        return any(self._is_invalid(value[name], (*place, "properties", name)) for name in value.keys() & named.keys())


def _listed(place: SchemaPath, node: dict[str, Any], keyword: str) -> Iterator[SchemaPath]:
    return ((*place, keyword, str(index)) for index in range(len(node[keyword])))


def _values(node: dict[str, Any]) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    if "enum" in node:
        return list(node["enum"])
    return list(_OF_FEW[node["type"]]) if isinstance(node.get("type"), str) and node["type"] in _OF_FEW else None


def _constant_text(value: Any) -> str:
    """Return the value as text like `canonical_text`, but faster for a string."""
    return f'"{value}' if isinstance(value, str) else canonical_text(value)


def _pairs(
    writers: list[_UnionAlternative], readers: list[_UnionAlternative]
) -> Iterator[tuple[_UnionAlternative, _UnionAlternative]]:
    """Yield the pairs of a writer and a reader that have different owners."""
    by_owner: tuple[dict[int, list[_UnionAlternative]], ...] = ({}, {})
    for found, group in zip(by_owner, (writers, readers), strict=True):
        for alternative in group:
            found.setdefault(alternative.owner, []).append(alternative)
    for owner, written in by_owner[0].items():
        for another, read in by_owner[1].items():
            if owner != another:
                yield from ((one, other) for one in written for other in read)


def _item(place: SchemaPath, node: dict[str, Any], index: int) -> SchemaPath | None:
    """Return the place of the schema of a list's item; None if the schema says nothing about it."""
    if index < len(node.get("prefixItems", ())):
        return (*place, "prefixItems", str(index))
    return (*place, "items") if "items" in node else None


def _kind(name: str) -> str:
    return "number" if name == "integer" else name


def _is_beyond(value: Any, node: dict[str, Any]) -> bool:
    """Return whether a number is outside its bounds, or a string, list or object is too short or too long."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_finite = isinstance(value, int) or math.isfinite(value)
        return is_finite and _numbers_apart({"minimum": value, "maximum": value}, node, whole=False)
    what = next((what for kind, what in _SIZED if isinstance(value, kind)), None)
    return what is not None and not node.get(f"min{what}", 0) <= len(value) <= node.get(f"max{what}", len(value))


def _types(node: dict[str, Any], *, implied: bool = False) -> list[str]:
    """Return the types of valid values; `implied`: the types of written values, which keywords restrict to their own
    type.
    """
    given = node.get("type")
    if given is None:
        return (implied_types(node) if implied else []) or list(PYTHON_TYPES)
    return [given] if isinstance(given, str) else list(given)


def _overlap(one: str, other: str) -> bool:
    return one == other or {one, other} == {"integer", "number"}


def _bounds_apart(one: dict[str, Any], other: dict[str, Any], min_keyword: str, max_keyword: str) -> bool:
    """Return whether one schema's bounds end before the other's begin."""
    return any(
        max_keyword in low and min_keyword in high and low[max_keyword] < high[min_keyword]
        for low, high in ((one, other), (other, one))
    )


def _numbers_apart(one: dict[str, Any], other: dict[str, Any], *, whole: bool) -> bool:
    """Return whether no number, or no whole number, lies within the bounds of both."""
    if whole:
        (lower, upper), (low, high) = integer_bounds(one, 0), integer_bounds(other, 0)
        return _ends_below(upper, low) or _ends_below(high, lower)
    return _ends_before(one, other) or _ends_before(other, one)


def _ends_below(upper: int | None, lower: int | None) -> bool:
    return upper is not None and lower is not None and upper < lower


def _ends_before(low: dict[str, Any], high: dict[str, Any]) -> bool:
    return any(
        max_keyword in low
        and min_keyword in high
        and (
            (end := Fraction(str(low[max_keyword]))) < (begin := Fraction(str(high[min_keyword])))
            or (end == begin and without)
        )
        for max_keyword, min_keyword, without in _ENDS
    )
