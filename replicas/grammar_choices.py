"""A choice of schemas with keywords beside it, as a choice of schemas each of which says those keywords too.

`{"properties": P, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}` is
`{"anyOf": [{"properties": P, "required": ["a"]}, {"properties": P, "required": ["b"]}]}`.
The grammar library knows the second alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .grammar_keywords import KEYWORDS
from .grammar_merge import merged

CHOICES = ("anyOf", "oneOf")

__all__ = ["CHOICES", "distributed"]


def distributed(
    node: dict[str, Any], resolved: Callable[[Any], tuple[dict[str, Any], list[str]] | None], *, may_nest: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """The schema, and the keywords of its choice that were lost.

    resolved  one schema of the choice without references and allOf, and what it lost; None where there is none
    may_nest  whether the schema may be a choice again; else it is what stands beside the choice

    The schema is as it was where nothing stands beside its choice, or a schema of it can't be resolved.
    """
    choice = next((keyword for keyword in CHOICES if isinstance(node.get(keyword), list) and node[keyword]), None)
    beside = {keyword: value for keyword, value in node.items() if keyword in KEYWORDS and keyword != choice}
    if choice is None or not beside:
        return node, []
    if not may_nest:
        return {keyword: value for keyword, value in node.items() if keyword != choice}, [choice]
    schemas, lost = [], []
    for index, schema in enumerate(node[choice]):
        found = resolved(schema)
        if found is None:
            return node, []
        both, more = merged(beside, found[0])
        schemas.append(both)
        lost += [f"{choice}/{index}/{keyword}" for keyword in (*found[1], *more)]
    return {keyword: value for keyword, value in node.items() if keyword not in beside} | {choice: schemas}, lost
