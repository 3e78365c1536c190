"""Schemas that let in no value: `false`, what leads to nothing else, and what requires itself without end.

Where such a schema need not be written it is left out: a property, a further item, an option of a choice. Where it must
be, the schema that requires it is refused by name. Without that the grammar library would refuse it in its own words,
or let a model write for ever (`{"a": {"a": {"a": …`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .keywords import IMPLIED_TYPES, MAX_SHOWN, SchemaRefused, allows_other_names, format_path, implied_types
from .references import SchemaPath, SchemaReferences

_CHOICES = ("anyOf", "oneOf")
_LEADING = ("$ref", "allOf", *_CHOICES)
_FURTHER = "further properties"


@dataclass(frozen=True, slots=True)
class _Part:
    """A schema of the document, or of its values the lists or objects alone (`kind` is `array` or `object`), or the
    properties that its objects must have beside the required ones (`further properties`).
    """

    place: SchemaPath
    kind: str = ""


@dataclass(frozen=True, slots=True)
class _Needs:
    """Parts that decide whether another lets in a value: all of them must, or at least `suffice` of them."""

    parts: tuple[_Part, ...] = ()
    suffice: int | None = None

    def count(self) -> int:
        """Return how many of the parts must let in a value."""
        return len(self.parts) if self.suffice is None else self.suffice


class ImpossibleSchemas:
    """Schemas of one document that let in no value. keywords.check_node has accepted each schema of the document."""

    def __init__(
        self,
        schemas: Mapping[SchemaPath, Any],
        references: SchemaReferences,
        written: Mapping[SchemaPath, Sequence[str]] | None = None,
    ) -> None:
        """Find them. written: properties that the object at that place is always written with, beside those that it
        requires.
        """
        self._schemas = schemas
        self._references = references
        self._written = written or {}
        self._needs = dict(self._all_needs())
        self._impossible = _unmet(self._needs)
        self._forbidden = _unmet({part: _Needs() if part.kind else needs for part, needs in self._needs.items()})

    def is_forbidden(self, place: SchemaPath) -> bool:
        """Return whether the schema is `false`, or leads to nothing else."""
        return _Part(place) in self._forbidden

    def is_impossible(self, place: SchemaPath) -> bool:
        """Return whether the schema lets in no value."""
        return _Part(place) in self._impossible

    def check(self, place: SchemaPath) -> None:
        """Raise SchemaRefused, naming the schema that is to blame, if a schema that is to be written lets in no value,
        or no list or no object though it allows them.
        """
        for start in (_Part(place, kind) for kind in ("", *IMPLIED_TYPES)):
            if start in self._impossible:
                raise self._refusal(start)

    def _all_needs(self) -> Iterator[tuple[_Part, _Needs]]:
        for place, node in self._schemas.items():
            whole = _Part(place)
            if isinstance(node, bool):
                yield whole, _Needs(suffice=0 if node else 1)
            elif (keyword := _leading_keyword(node)) is not None:
                yield whole, self._needs_of_leading(place, node, keyword)
            else:
                names, alone = _compound_types(node)
                parts = tuple(_Part(place, name) for name in names)
                yield whole, _Needs(parts, suffice=1) if alone else _Needs()
                for part in parts:
                    yield from self._needs_of_parts(part, node)

    def _needs_of_leading(self, place: SchemaPath, node: dict[str, Any], keyword: str) -> _Needs:
        if keyword == "$ref":
            return _Needs((_Part(self._references.place(node["$ref"])),))
        options = tuple(_Part((*place, keyword, str(index))) for index in range(len(node[keyword])))
        return _Needs(options, suffice=1 if keyword in _CHOICES else None)

    def _needs_of_parts(self, part: _Part, node: dict[str, Any]) -> Iterator[tuple[_Part, _Needs]]:
        """Yield what each list, or each object, of the schema must have."""
        if part.kind == "array":
            yield part, _Needs(_required_items(part.place, node))
            return
        names = dict.fromkeys([*node.get("required", ()), *self._written.get(part.place, ())])
        further = _further_properties(part.place, node, names)
        more = _Part(part.place, _FURTHER)
        required = tuple(_Part((*part.place, "properties", name)) for name in names)
        yield part, _Needs((*required, more) if further.count() else required)
        yield more, further

    def _refusal(self, start: _Part) -> SchemaRefused:
        """Return the refusal of what requires an impossible schema: the last before a `false`, or the first in a
        circle.
        """
        steps = {start: None}  # in order
        found = self._impossible_need(start)
        while found is not None and found not in steps:
            steps[found] = None
            found = self._impossible_need(found)
        way = list(steps)
        way = way[::-1] if found is None else way[way.index(found) :]
        to_blame = next((part for part in way if part.kind), None)
        if to_blame is not None:
            return self._refused_list(to_blame) if to_blame.kind == "array" else self._refused_object(to_blame)
        place = next((part.place for part in way if self._needs[part].parts), start.place)
        keyword = None if isinstance(self._schemas[place], bool) else _leading_keyword(self._schemas[place])
        return _refused(f"{format_path(place)}: the schema lets in no value", place, keyword)

    def _impossible_need(self, part: _Part) -> _Part | None:
        return next((need for need in self._needs[part].parts if need in self._impossible), None)

    def _refused_object(self, part: _Part) -> SchemaRefused:
        place = part.place
        required = self._schemas[place].get("required", ())
        left = [name for name in required if _Part((*place, "properties", name)) not in self._impossible]
        name = next((name for name in required if name not in left), None)
        if name is None:
            return self._refused_count(place)
        why = f"{format_path(place)}: the property {name[:MAX_SHOWN]!r} is required, and its schema lets in no value"
        return _refused(why, place, "required", left)

    def _refused_count(self, place: SchemaPath) -> SchemaRefused:
        node = self._schemas[place]
        named = [name for name in node.get("properties", ()) if not self.is_impossible((*place, "properties", name))]
        why = (
            f"{format_path(place)}: 'minProperties' is {node['minProperties']}, "
            f"and there are {len(named)} properties that can have a value"
        )
        return _refused(why, place, "minProperties", len(named))

    def _refused_list(self, part: _Part) -> SchemaRefused:
        place = part.place
        items = self._needs[part].parts
        index = next(index for index, item in enumerate(items) if item in self._impossible)
        min_items = self._schemas[place]["minItems"]
        why = f"{format_path(place)}: 'minItems' is {min_items}, and the schema of item {index} lets in no value"
        return _refused(why, place, "minItems", index)


def _leading_keyword(node: dict[str, Any]) -> str | None:
    return next((keyword for keyword in _LEADING if keyword in node), None)


def _compound_types(node: dict[str, Any]) -> tuple[list[str], bool]:
    """Return which of the schema's types are lists and objects, which may require others, and whether it has no other
    types.
    """
    given = node.get("type", implied_types(node))
    names = [given] if isinstance(given, str) else given
    found = [] if "enum" in node or "const" in node else [name for name in IMPLIED_TYPES if name in names]
    return found, bool(found) and len(found) == len(set(names))


def _required_items(place: SchemaPath, node: dict[str, Any]) -> tuple[_Part, ...]:
    """Return the schemas of the items that each list must have."""
    count, listed = node.get("minItems", 0), len(node.get("prefixItems", ()))
    first = [_Part((*place, "prefixItems", str(index))) for index in range(min(count, listed))]
    return (*first, *([_Part((*place, "items"))] if count > listed and "items" in node else ()))


def _further_properties(place: SchemaPath, node: dict[str, Any], required: Mapping[str, None]) -> _Needs:
    """Return the schemas of the properties that `minProperties` asks for beside the required ones.

    Where it allows names that it does not list, one of all these suffices: a schema that needs several is refused.
    """
    count = max(0, node.get("minProperties", 0) - len(required))
    listed = [_Part((*place, "properties", name)) for name in node.get("properties", ()) if name not in required]
    if not allows_other_names(node):
        return _Needs(tuple(listed), count)
    patterns: list[SchemaPath] = [("patternProperties", pattern) for pattern in node.get("patternProperties", ())]
    others = patterns or [("additionalProperties",)] * ("additionalProperties" in node)
    return _Needs((*listed, *(_Part((*place, *path)) for path in others)), min(count, 1)) if others else _Needs()


def _unmet(needs: Mapping[_Part, _Needs]) -> frozenset[_Part]:
    """Return the parts that let in no value: all but those that can be shown to let in one, step by step."""
    left = {part: need.count() for part, need in needs.items()}
    users: dict[_Part, list[_Part]] = {}
    for part, need in needs.items():
        for needed in need.parts:
            users.setdefault(needed, []).append(part)
    met = [part for part, count in left.items() if count == 0]
    for part in met:
        for user in users.get(part, ()):
            left[user] -= 1
            if left[user] == 0:
                met.append(user)
    return frozenset(part for part, count in left.items() if count > 0)


def _refused(why: str, place: SchemaPath, keyword: str | None, instead: Any = None) -> SchemaRefused:
    refused = SchemaRefused(
        why,
        drops=[] if keyword is None else [keyword],
        instead={keyword: instead} if keyword is not None and instead else {},
    )
    refused.place = place
    return refused
