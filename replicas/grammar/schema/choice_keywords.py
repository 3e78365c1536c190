"""Distribution of keywords over a choice of schemas, so that each schema of the choice has the keywords beside it too.

`{"properties": P, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}` is
`{"anyOf": [{"properties": P, "required": ["a"]}, {"properties": P, "required": ["b"]}]}`.
The grammar library only knows the second form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .all_of import exclude_each_other, merge_schemas
from .keywords import KEYWORDS

CHOICE_KEYWORDS = ("anyOf", "oneOf")


def distribute_keywords(
    node: dict[str, Any], resolved: Callable[[Any], tuple[dict[str, Any], list[str]] | None], *, may_nest: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Return the schema with the keywords distributed, and the keywords of its choice that were lost.

    resolved  returns a schema of the choice without references and allOf, and what it lost; None if that is impossible
    may_nest  whether the schema may be a choice again; else the choice is dropped and the keywords beside it stay

    The schema is unchanged if nothing stands beside its choice, or if a schema of the choice cannot be resolved. Those
    of its schemas that have no value in common with the keywords become `false`, unless all are like that.
    """
    choice = next(
        (keyword for keyword in CHOICE_KEYWORDS if isinstance(node.get(keyword), list) and node[keyword]), None
    )
    beside = {keyword: value for keyword, value in node.items() if keyword in KEYWORDS and keyword != choice}
    if choice is None or not beside:
        return node, []
    if not may_nest:
        return {keyword: value for keyword, value in node.items() if keyword != choice}, [choice]
    options: list[Any] = [(False, []) if schema is False else resolved(schema) for schema in node[choice]]
    if None in options:
        return node, []
    possible = [option is not False and not exclude_each_other(beside, option) for option, _ in options]
    schemas: list[Any] = []
    lost: list[str] = []
    for index, (option, less) in enumerate(options):
        if option is False or (any(possible) and not possible[index]):
            schemas.append(False)
            continue
        both, more = merge_schemas(beside, option)
        schemas.append(both)
        lost += [f"{choice}/{index}/{keyword}" for keyword in (*less, *more)]
    return {keyword: value for keyword, value in node.items() if keyword not in beside} | {choice: schemas}, lost
