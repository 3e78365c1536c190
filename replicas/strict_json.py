"""JSON from clients, in a body or as a string within one: no name may occur twice, since readers differ on which
counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from .short_repr import MAX_REPR_CHARS, first_duplicate


class DuplicateName(ValueError):
    """Error for an object that has a name twice. path: where, such as `logit_bias.5`."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: given twice")
        self.path = path


class _JsonPairs(list[tuple[str, Any]]):
    """A JSON object as the list of its (name, value) pairs, in the order in which it is written."""


def parse_strict_json(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON. Raises DuplicateName, json's own ValueError, or RecursionError."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=parse_constant)
    except DuplicateName as error:
        found = next(_duplicate_paths(json.loads(text, object_pairs_hook=_JsonPairs), ""), error.path)
        raise DuplicateName(found[:MAX_REPR_CHARS]) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise DuplicateName(first_duplicate(name for name, _ in pairs) or "")
    return value


def _duplicate_paths(value: Any, at: str) -> Iterator[str]:
    """Yield the paths of names that occur twice, outermost first."""
    if isinstance(value, _JsonPairs):
        twice = first_duplicate(name for name, _ in value)
        if twice is not None:
            yield f"{at}.{twice}" if at else twice
        for name, inner in value:
            yield from _duplicate_paths(inner, f"{at}.{name}" if at else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _duplicate_paths(inner, f"{at}[{index}]")
