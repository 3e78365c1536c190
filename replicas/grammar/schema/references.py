"""References of a JSON Schema: each leads to a schema of the same document, which is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

SchemaPath = tuple[str, ...]  # parts of a JSON pointer: names, and indices in lists

MAX_STEPS = 32_768  # most parts of all different references together
MAX_SHOWN = 60
_FRAGMENT = re.compile(r"#(/[^/]*)*")


class BadReference(Exception):
    """Error that says why a reference is bad, without its place."""


class TooManySteps(BadReference):
    """Error for references that take too long to follow."""


class SchemaReferences:
    """References of one schema document. Each target is read once, and chains that share links are followed once."""

    def __init__(self, schemas: Mapping[SchemaPath, Any]) -> None:
        """Prepare the references. schemas: every schema of the document by its place, () being the whole."""
        self._schemas = schemas
        self._places: dict[str, SchemaPath] = {}
        self._ends: set[SchemaPath] = set()  # schemas that are known to lead to one that is no reference
        self._steps = 0

    def place(self, target: Any) -> SchemaPath:
        """Return the place that `target` points to. Raises BadReference unless a schema stands there."""
        if not isinstance(target, str) or not _FRAGMENT.fullmatch(target):
            raise BadReference(f"{str(target)[:MAX_SHOWN]!r} is not supported; expected '#' or '#/…'")
        if target not in self._places:
            self._places[target] = self._read(target)
        return self._places[target]

    def check(self, target: Any) -> None:
        """Raise BadReference unless `target` leads, perhaps by further references, to a schema that is no reference."""
        place, seen = self.place(target), set[SchemaPath]()
        while place not in self._ends:
            if place in seen:
                raise BadReference(f"{target[:MAX_SHOWN]!r} leads back to itself")
            seen.add(place)
            schema = self._schemas[place]
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            place = self.place(schema["$ref"])
        self._ends |= seen

    def end(self, place: SchemaPath) -> SchemaPath:
        """Return the place where the references that begin at `place` end; all of them have been checked."""
        while isinstance(node := self._schemas[place], dict) and "$ref" in node:
            place = self.place(node["$ref"])
        return place

    def follow(self, place: SchemaPath) -> Any:
        """Return the schema at that place, or the one that it leads to."""
        return self._schemas[self.end(place)]

    def _read(self, target: str) -> SchemaPath:
        try:
            place = split_pointer(target)
        except UnicodeDecodeError:
            raise BadReference(f"{target[:MAX_SHOWN]!r} is not UTF-8") from None
        self._steps += len(place)
        if self._steps > MAX_STEPS:
            raise TooManySteps("following all of them takes too long")
        if place not in self._schemas:
            raise BadReference(f"no schema stands at {target[:MAX_SHOWN]!r}")
        return place


def split_pointer(target: str) -> SchemaPath:
    """Return the names on the way from the root of the document that a reference, `#` or `#/…`, leads along.

    Raises UnicodeDecodeError for an escape that is not UTF-8.
    """
    parts = unquote(target[1:], errors="strict").split("/")[1:]
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)
