"""Distribution of keywords over a choice of schemas, so that each schema of the choice has the keywords beside it too.

`{"properties": P, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}` is
`{"anyOf": [{"properties": P, "required": ["a"]}, {"properties": P, "required": ["b"]}]}`.
The grammar library only knows the second form.
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
    """Return the schema with the keywords distributed, and the keywords of its choice that were lost.

    resolved  returns a schema of the choice without references and allOf, and what it lost; None if that is impossible
    may_nest  whether the schema may be a choice again; else the choice is dropped and the keywords beside it stay

    The schema is unchanged if nothing stands beside its choice, or if a schema of the choice cannot be resolved.
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
