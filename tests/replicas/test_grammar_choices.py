"""A choice with keywords beside it takes the same values once each of its schemas says those keywords."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from schema_values import GROUPS, part, takes

from motley.replicas.grammar.schema.choice_keywords import CHOICE_KEYWORDS, distribute_keywords

INTEGER = {"type": "integer"}


def as_it_is(schema: Any) -> tuple[dict[str, Any], list[str]] | None:
    return (schema, []) if isinstance(schema, dict) else None


def test_the_same_values_are_taken_and_none_less_where_a_keyword_was_lost() -> None:
    draw = random.Random(0)
    exact = 0
    for group in GROUPS * 300:
        choice = draw.choice(CHOICE_KEYWORDS)
        node = part(draw, group) | {choice: [part(draw, group) for _ in range(draw.randint(1, 3))]}
        before = json.dumps(node)
        found, lost = distribute_keywords(node, as_it_is)
        assert json.dumps(node) == before
        assert found.keys() == {choice}
        if not lost:
            exact += 1
            assert takes(found) == takes(node), (node, found)
        else:
            assert {*map(str, takes({"anyOf": found[choice]}))} >= {*map(str, takes(node))}, (node, found, lost)
    assert exact > 500


@pytest.mark.parametrize(
    "schema",
    [
        INTEGER,
        {"anyOf": [INTEGER]},
        {"title": "A", "anyOf": [INTEGER]},
        {**INTEGER, "anyOf": [True]},
        {**INTEGER, "anyOf": []},
    ],
)
def test_what_has_nothing_beside_its_choice_or_no_plain_schemas_stays(schema: dict[str, Any]) -> None:
    assert distribute_keywords(schema, as_it_is) == (schema, [])


def test_definitions_and_descriptions_stay_where_they_are() -> None:
    schema = {**INTEGER, "$defs": {"a": INTEGER}, "description": "A", "anyOf": [{"minimum": 1}]}
    assert distribute_keywords(schema, as_it_is) == (
        {"$defs": {"a": INTEGER}, "description": "A", "anyOf": [{**INTEGER, "minimum": 1}]}, [],
    )  # fmt: skip


def test_a_choice_that_may_nest_no_further_goes() -> None:
    assert distribute_keywords({**INTEGER, "anyOf": [{"minimum": 1}]}, as_it_is, may_nest=False) == (INTEGER, ["anyOf"])
